"""The other ends of a gateway's wires, scripted: a control plane and decode workers, real gRPC servers all of them.

What this cannot prove is that the real ones behave like this; tests/system does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import common_pb2, control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from protos.registration import WIRE_VERSION
from protos.serving import Server, serve

MODEL = "tiny"


async def eventually(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class ScriptedControl(control_pb2_grpc.ControlServiceServicer):
    """Takes registrations, and tells watchers of the workers that a test shows it."""

    def __init__(self) -> None:
        self.registered: list[control_pb2.Node] = []
        self.loads: list[control_pb2.Load] = []
        self.address = ""
        self._nodes: dict[str, control_pb2.NodeState] = {}
        self._watchers: set[asyncio.Queue[control_pb2.WatchResponse]] = set()
        self._server: Server | None = None

    async def start(self) -> None:
        def register(server: grpc.aio.Server) -> list[str]:
            control_pb2_grpc.add_ControlServiceServicer_to_server(self, server)
            return []

        self._server = await serve(register, host="127.0.0.1")
        self.address = self._server.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def show(self, state: control_pb2.NodeState) -> None:
        self._nodes[state.node.node_id] = state
        self._tell(control_pb2.WatchResponse(control_epoch=1, node=state))

    def hide(self, state: control_pb2.NodeState) -> None:
        del self._nodes[state.node.node_id]
        gone = control_pb2.NodeGone(node_id=state.node.node_id, incarnation=state.node.incarnation, reason="hidden")
        self._tell(control_pb2.WatchResponse(control_epoch=1, gone=gone))

    def _tell(self, response: control_pb2.WatchResponse) -> None:
        for queue in self._watchers:
            queue.put_nowait(response)

    async def Watch(
        self, request: control_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[control_pb2.WatchResponse]:
        queue: asyncio.Queue[control_pb2.WatchResponse] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            snapshot = control_pb2.Snapshot(nodes=list(self._nodes.values()))
            yield control_pb2.WatchResponse(control_epoch=1, snapshot=snapshot)
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    async def Join(
        self, requests: AsyncIterator[control_pb2.JoinRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[control_pb2.JoinResponse]:
        async for request in requests:
            if request.HasField("registration"):
                self.registered.append(request.registration)
                yield control_pb2.JoinResponse(control_epoch=1, joined=control_pb2.Joined())
            elif request.HasField("load"):
                self.loads.append(request.load)


@dataclass
class Script:
    """How a worker answers. Tests change it while it runs."""

    output: list[int] = field(default_factory=list)
    """The tokens that the model gives, whatever the prompt; then it stops."""
    answer: str = "accept"
    """"accept", "reject", "silence", or a failure code such as "INVALID"."""
    tokens_per_message: int = 1
    pause_after: int | None = None
    """Give no more than so many output tokens until it is raised or None."""
    fail_after: tuple[int, str] | None = None
    """(output tokens, failure code): fail every attempt that has got that far."""
    cached_tokens: int = 0


class ScriptedWorker(worker_pb2_grpc.DecodeServiceServicer):
    """A decode worker whose model says what its script says: the next token depends on the number of output tokens."""

    _incarnations = itertools.count(1)

    def __init__(self, node_id: str, script: Script) -> None:
        self.node_id = node_id
        self.script = script
        self.incarnation = f"{node_id}.{next(self._incarnations)}"
        self.gateways: list[str] = []
        """Those that opened a session, by incarnation."""
        self.starts: list[worker_pb2.StartAttempt] = []
        self.cancelled: list[tuple[str, int]] = []
        self.running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.sent = 0
        """Output tokens of the attempt that was told of some last, those of earlier attempts included."""
        self.errors: list[BaseException | None] = []
        """Faults of the script itself."""
        self.pages_total = 1000
        self.load: dict[str, Any] = {}
        self._server: Server | None = None
        self._address = ""

    async def start(self, port: int = 0) -> None:
        def register(server: grpc.aio.Server) -> list[str]:
            worker_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)
            return []

        self._server = await serve(register, host="127.0.0.1", port=port)
        self._address = self._server.address

    async def die(self) -> None:
        """As a killed process: its sessions break, and nobody answers any more."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    def state(self, *, ready: bool = True, model: str = MODEL) -> control_pb2.NodeState:
        load = {
            "ready": ready,
            "pages_total": self.pages_total,
            "pages_free": self.pages_total,
            "room_pages": self.pages_total,
            **self.load,
        }
        return control_pb2.NodeState(
            node=control_pb2.Node(
                node_id=self.node_id,
                incarnation=self.incarnation,
                role=common_pb2.ROLE_DECODE,
                address=self._address,
                fingerprint=control_pb2.Fingerprint(
                    model=model, namespace=b"n" * 16, page_size=16, page_bytes=1024, wire_version=WIRE_VERSION
                ),
            ),
            load=control_pb2.Load(**load),
        )

    async def Session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        # One writer: an attempt that is cancelled while it writes would spoil the stream for the others.
        unread: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, unread))
        try:
            while (response := await unread.get()) is not None:
                yield response
        finally:
            reader.cancel()

    async def _read(
        self,
        requests: AsyncIterator[worker_pb2.SessionRequest],
        unread: asyncio.Queue[worker_pb2.SessionResponse | None],
    ) -> None:
        names: set[tuple[str, int]] = set()
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "hello":
                        self.gateways.append(request.hello.gateway_incarnation)
                        welcome = worker_pb2.SessionWelcome(incarnation=self.incarnation)
                        unread.put_nowait(worker_pb2.SessionResponse(welcome=welcome))
                    case "start":
                        name = (request.start.request_id, request.start.attempt)
                        self.starts.append(request.start)
                        names.add(name)
                        self.running[name] = asyncio.create_task(self._serve(request.start, unread))
                        self.running[name].add_done_callback(self._check)
                    case "cancel":
                        name = (request.cancel.request_id, request.cancel.attempt)
                        self.cancelled.append(name)
                        if name in self.running:
                            self.running.pop(name).cancel()
        finally:
            unread.put_nowait(None)
            for name in names & self.running.keys():
                self.running.pop(name).cancel()

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.errors.append(task.exception())

    async def _serve(
        self, start: worker_pb2.StartAttempt, unread: asyncio.Queue[worker_pb2.SessionResponse | None]
    ) -> None:
        async def tell(**event: Any) -> None:
            message = worker_pb2.AttemptEvent(request_id=start.request_id, attempt=start.attempt, **event)
            unread.put_nowait(worker_pb2.SessionResponse(step=worker_pb2.StepEvents(events=[message])))
            await asyncio.sleep(0)

        name = (start.request_id, start.attempt)
        script = self.script
        match script.answer:
            case "silence":
                await asyncio.Event().wait()
            case "reject":
                del self.running[name]
                await tell(rejected=worker_pb2.AttemptRejected(needed_pages=10, room_pages=3))
                return
            case "accept":
                await tell(accepted=worker_pb2.AttemptAccepted(cached_tokens=script.cached_tokens))
            case code:
                del self.running[name]
                await tell(failed=_failure(code))
                return
        sent = len(start.token_ids) - start.num_prompt_tokens
        limit = start.sampling.max_tokens or len(script.output)
        while sent < min(limit, len(script.output)):
            if script.fail_after is not None and sent >= script.fail_after[0]:
                del self.running[name]
                await tell(failed=_failure(script.fail_after[1]))
                return
            if script.pause_after is not None and sent >= script.pause_after:
                await asyncio.sleep(0.005)
                continue
            end = min(sent + script.tokens_per_message, limit, script.pause_after or limit)
            token_ids = script.output[sent:end]
            logprobs = (
                [] if start.sampling.top_logprobs < 0 else list(_logprobs(token_ids, start.sampling.top_logprobs))
            )
            await tell(tokens=worker_pb2.AttemptTokens(token_ids=token_ids, logprobs=logprobs))
            sent += len(token_ids)
            self.sent = sent
        reason = worker_pb2.FINISH_REASON_LENGTH if sent >= limit else worker_pb2.FINISH_REASON_STOP
        if start.sampling.max_tokens == 0 or sent < start.sampling.max_tokens:
            reason = worker_pb2.FINISH_REASON_STOP
        del self.running[name]
        await tell(finished=worker_pb2.AttemptFinished(reason=reason, cached_tokens=script.cached_tokens))


def _failure(code: str) -> worker_pb2.AttemptFailed:
    return worker_pb2.AttemptFailed(
        code=worker_pb2.FailureCode.Value(f"FAILURE_CODE_{code}"), message=f"scripted {code}"
    )


def _logprobs(token_ids: Iterable[int], num_top: int) -> Iterable[common_pb2.TokenLogprobs]:
    """The chosen token at -0.5, and alternatives with the next ids at -1, -2, ..."""
    for token_id in token_ids:
        top = [common_pb2.TokenLogprob(token_id=token_id + rank, logprob=-float(rank + 1)) for rank in range(num_top)]
        yield common_pb2.TokenLogprobs(logprob=-0.5, top=top)


@contextlib.asynccontextmanager
async def scripted_cluster(*scripts: Script) -> AsyncIterator[tuple[ScriptedControl, list[ScriptedWorker]]]:
    """A control plane that shows one decode worker per script."""
    control = ScriptedControl()
    workers = [ScriptedWorker(f"decode-{index}", script) for index, script in enumerate(scripts)]
    await control.start()
    try:
        for worker in workers:
            await worker.start()
            control.show(worker.state())
        yield control, workers
    finally:
        for worker in workers:
            await worker.die()
        await control.stop()
