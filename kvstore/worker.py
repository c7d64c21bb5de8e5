"""What prefill and decode workers have in common around their cores:

the place in the cluster, and the work on pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import grpc

from kvstore.client import KvClient
from kvstore.pages import EvictPrefixes, OfferPages, OfferSettled, PageLayout, StorageChanged
from kvstore.plane import PagePlane
from kvstore.refs import StopPull
from kvstore.stored_pages import StoredPages
from kvstore.transport import Pull, boot_time_s
from protos import common_pb2, control_pb2
from protos.registration import WIRE_VERSION, NodeConfig, Registration
from protos.serving import Server, serve

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 1.0
_HEALTH_S = 0.5
_STALLED_S = 60.0
"""A step loop that has not come round for so long is stalled: a long chunk on a busy CPU takes seconds."""


class Inbox(Protocol):
    """Of the step loop."""

    def put(self, event: object, /) -> None: ...


def fingerprint_of(model: str, namespace: bytes, layout: PageLayout) -> control_pb2.Fingerprint:
    """What two workers must have in common to exchange pages."""
    return control_pb2.Fingerprint(
        model=model,
        namespace=namespace,
        page_size=layout.page_size,
        page_bytes=layout.page_bytes,
        dtype=layout.dtype,
        wire_version=WIRE_VERSION,
    )


class WorkerShell:
    """Registers the worker, obeys directives, reports its load, and carries out what any core orders about pages.

    Belongs to the event loop's thread, but for `inbox`, which is how it speaks to the step loop.
    """

    def __init__(
        self,
        config: NodeConfig,
        role: common_pb2.Role,
        fingerprint: control_pb2.Fingerprint,
        plane: PagePlane,
        inbox: Inbox,
    ) -> None:
        self.client = KvClient()
        self.stored = StoredPages(plane, self.client)
        self.address = ""
        """host:port, once started."""
        self._config = config
        self._role = role
        self._fingerprint = fingerprint
        self._plane = plane
        self._inbox = inbox
        self._load = control_pb2.Load()
        self._last_turn_s = boot_time_s()
        self._refused_since_unix_s: float | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: Server | None = None
        self._registration: Registration | None = None

    async def start(self, register: Callable[[grpc.aio.Server], Sequence[str]]) -> None:
        """Listen with the services that `register` adds, and begin to register with the control plane."""
        self._server = await serve(register, host=self._config.host)
        self.address = self._server.address
        node = control_pb2.Node(
            node_id=self._config.node_id,
            incarnation=self._plane.incarnation,
            role=self._role,
            address=self.address,
            fingerprint=self._fingerprint,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        self._registration = Registration(self._config, node, self.current_load)
        await self._registration.start()
        self.spawn(self._obey(self._registration), "directives")
        self.spawn(self._watch_health(self._server), "health")

    async def stop(self, *, in_good_order: bool = True) -> None:
        """Leave the cluster, then stop listening. Idempotent. in_good_order: whether the cluster is told so."""
        if self._registration is not None:
            await self._registration.stop(leave=in_good_order)
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run in the background until `stop`; what it raises is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def turned(self, load: control_pb2.Load, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """The step loop came round; this is its state, and the keys that entered and left its tree."""
        self._load = load
        self._last_turn_s = boot_time_s()
        if self._registration is not None and (added or removed):
            self._registration.publish(added, removed)

    def carry_out(self, instruction: Pull | StopPull | OfferPages) -> None:
        match instruction:
            case Pull():
                self._plane.submit(instruction)
            case StopPull():
                self._plane.stop(instruction.pull_id)
            case OfferPages():
                self.spawn(self._offer(instruction), f"offer {instruction.offer_id}")

    async def _offer(self, offer: OfferPages) -> None:
        num_refused = len(offer.pages)
        try:
            num_refused = len((await self.stored.offer(offer.pages)).refused)
        finally:
            if num_refused < len(offer.pages):
                self._refused_since_unix_s = None
            elif self._refused_since_unix_s is None:
                self._refused_since_unix_s = time.time()
            self._inbox.put(OfferSettled(offer.offer_id, num_refused))

    async def _obey(self, registration: Registration) -> None:
        while True:
            directive = await registration.directives.get()
            match directive.WhichOneof("directive"):
                case "storage":
                    for incarnation in self.client.update(directive.storage):
                        self._plane.forget(incarnation)
                    if not directive.storage.members:
                        self._refused_since_unix_s = None  # Nothing is offered then.
                    self._inbox.put(StorageChanged(len(directive.storage.members)))
                case "evict":
                    self._inbox.put(EvictPrefixes())

    async def _watch_health(self, server: Server) -> None:
        while True:
            await server.set_ready(self._is_ready)
            await asyncio.sleep(_HEALTH_S)

    @property
    def _is_ready(self) -> bool:
        return boot_time_s() - self._last_turn_s < _STALLED_S and self._plane.failure is None

    def current_load(self) -> control_pb2.Load:
        """State and figures as of the step loop's last turn."""
        load = control_pb2.Load()
        load.CopyFrom(self._load)
        load.ready = self._is_ready
        self._plane.stats.tell(load)
        if self._refused_since_unix_s is not None:
            load.degradations.add(
                kind="kv-store-refuses",
                consequence="cold pages are dropped: no storage node took any of those that were offered last",
                since_unix_s=self._refused_since_unix_s,
            )
        return load

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            if (error := task.exception()) is not None:
                logger.error("%s failed", task.get_name(), exc_info=error)
