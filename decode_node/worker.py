"""The decode worker process: it loads the model, listens, registers, and joins its three loops by queues."""

from __future__ import annotations

import asyncio
import logging
import queue
import uuid
from collections.abc import Sequence

import grpc
import torch

from decode_node.config import DecodeConfig
from decode_node.core import DecodeCore, Instruction
from decode_node.messages import AskPrefill, CancelPrefill, ReleasePrefill, Reply
from decode_node.prefill_client import PrefillClient
from decode_node.service import DecodeService
from engine.core import EngineCore
from engine.loop import StepLoop
from engine.model import load_model
from engine.namespace import namespace_of
from kvstore.pages import OfferPages, WriteBack
from kvstore.plane import PagePlane
from kvstore.refs import StopPull
from kvstore.transport import Pull, boot_time_s
from kvstore.worker import WorkerShell, fingerprint_of
from protos import common_pb2, control_pb2, worker_pb2, worker_pb2_grpc
from protos.convert import to_message

logger = logging.getLogger(__name__)


class DecodeWorker:
    """Event loop: gRPC, registration, storage nodes. Step loop: `DecodeCore`. Transport thread: in `PagePlane`.

    The three meet in queues alone: what happens outside goes to the step loop's inbox, and each turn's instructions
    come back to `_turned` on the event loop.
    """

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._loaded = False
        self._stopped = False
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.incarnation = f"{config.node.node_id}-{uuid.uuid4().hex[:8]}"
        self._ended: asyncio.Future[str] | None = None

    @property
    def address(self) -> str:
        """host:port of the gRPC listener, after `start`."""
        return self._shell.address

    @property
    def stats(self) -> control_pb2.Load:
        """State and figures as of the step loop's last turn."""
        return self._shell.current_load()

    async def start(self) -> None:
        """Load the model, register the memory, listen.

        Returns when it can serve; registering goes on in the background.
        """
        self._events = asyncio.get_running_loop()
        self._ended = self._events.create_future()
        await asyncio.to_thread(self._load)
        name = self._config.model.name
        self._service = DecodeService(self.incarnation, name, self._inbox.put)
        self._prefill = PrefillClient(self._plane, name, self._inbox.put)
        self._loop.start()
        self._shell.spawn(self._watch_transport(), "transport")
        await self._shell.start(self._register)

    async def stop(self) -> None:
        """Leave the cluster and let go of everything. Streams that still run break. Idempotent.

        After a crash the cluster sees the worker break off, and its successor as a restart.
        """
        if self._ended is None or self._stopped:
            return
        self._stopped = True
        in_good_order = not self._ended.done()
        self._end("stopped")
        if not self._loaded:
            return
        await self._shell.stop(in_good_order=in_good_order)
        await self._prefill.close()
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._plane.close)

    async def wait_ended(self) -> str:
        """Until the worker was stopped, or its step loop or transport died and it must be replaced. Says which."""
        assert self._ended is not None, "not started"
        return await asyncio.shield(self._ended)

    def _load(self) -> None:
        """Seconds: weights, pool, transport."""
        config = self._config
        torch.set_num_threads(config.threads)
        model = load_model(config.model)
        layout = model.layout(config.page_size)
        self._plane = PagePlane(layout, config.plane, self.incarnation, self._inbox)
        model.bind(self._plane.cache.pages, layout)
        self._plane.start()
        namespace = namespace_of(model, config.page_size)
        cache = self._plane.cache
        core = DecodeCore(
            EngineCore(model, cache, config.engine), WriteBack(cache, config.write_back), config.core, namespace
        )
        self._core = core
        self._loop: StepLoop[Instruction] = StepLoop(
            core,
            self._inbox,
            self._deliver,
            self._crashed,
            name=f"step loop of {config.node.node_id}",
            clock=boot_time_s,
        )
        self._shell = WorkerShell(
            config.node,
            common_pb2.ROLE_DECODE,
            fingerprint_of(config.model.name, namespace, layout),
            self._plane,
            self._inbox,
        )
        self._loaded = True

    def _register(self, server: grpc.aio.Server) -> Sequence[str]:
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self._service, server)
        return [worker_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name]

    # On the step loop's thread.

    def _deliver(self, instructions: Sequence[Instruction]) -> None:
        added, removed = self._plane.cache.drain_changes()
        load = to_message(self._core.stats(), control_pb2.Load)
        self._events.call_soon_threadsafe(self._turned, instructions, load, added, removed)

    def _crashed(self, error: BaseException) -> None:
        self._events.call_soon_threadsafe(self._end, f"{type(error).__name__}: {error}")

    # On the event loop's thread.

    def _turned(
        self,
        instructions: Sequence[Instruction],
        load: control_pb2.Load,
        added: Sequence[bytes],
        removed: Sequence[bytes],
    ) -> None:
        self._shell.turned(load, added, removed)
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Pull() | StopPull() | OfferPages():
                self._shell.carry_out(instruction)
            case AskPrefill() | CancelPrefill() | ReleasePrefill():
                self._prefill.carry_out(instruction)
            case Reply():
                self._service.reply(instruction)

    async def _watch_transport(self) -> None:
        self._end(await self._plane.wait_failed())

    def _end(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)
