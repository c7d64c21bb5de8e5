"""A node's place in the cluster: one stream to the control plane, kept up for as long as the node lives."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc

from protos import control_pb2, control_pb2_grpc
from protos.serving import connect

logger = logging.getLogger(__name__)

KEYS_PER_MESSAGE = 50_000
"""Page keys of 16 bytes: about 900 kB, far below the message limit."""
MAX_DIRECTIVES = 64
"""Directives that wait for the node; beyond it the oldest goes, since a newer view replaces an older one."""
WIRE_VERSION = 1
"""Part of the fingerprint; goes up with a change that an older node would misread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """What any node needs to be part of a cluster."""

    node_id: str
    """Stable across restarts, such as "decode-0"."""
    control_address: str
    """host:port of the control plane."""
    host: str = "127.0.0.1"
    """Address to listen on and to advertise; ports are free ones."""
    heartbeat_s: float = 1.0
    """Seconds between load reports; the control plane takes several missing ones for death."""
    join_deadline_s: float = 5.0
    """Seconds that the control plane may take to answer a registration, or to take a report."""
    reconnect_min_s: float = 0.1
    """First wait after a lost connection; doubles up to `reconnect_max_s`."""
    reconnect_max_s: float = 2.0
    """Longest wait between two attempts to register."""

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ValueError("node_id must not be empty")
        for name in ("heartbeat_s", "join_deadline_s", "reconnect_min_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.reconnect_max_s < self.reconnect_min_s:
            raise ValueError(f"reconnect_max_s {self.reconnect_max_s} is below reconnect_min_s {self.reconnect_min_s}")


class _SessionLost(Exception):
    """The stream is of no more use, for a reason that gRPC did not give."""


class _Prefixes:
    """The keys in a node's tree, and what of it the control plane has not been told."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._untold: dict[bytes, bool] = {}  # key -> is it there now; only keys whose last told state differs

    def update(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for keys, there in ((added, True), (removed, False)):
            for key in keys:
                if (key in self._keys) == there:
                    continue
                (self._keys.add if there else self._keys.discard)(key)
                # A change back to what was told last needs no telling: so this never outgrows the two key sets.
                if self._untold.pop(key, None) is None:
                    self._untold[key] = there

    def __bool__(self) -> bool:
        return bool(self._untold)

    def take(self) -> control_pb2.PrefixDelta:
        """The next piece of what has not been told; it counts as told from here on."""
        piece = list(itertools.islice(self._untold.items(), KEYS_PER_MESSAGE))
        for key, _ in piece:
            del self._untold[key]
        return control_pb2.PrefixDelta(
            added=[key for key, there in piece if there], removed=[key for key, there in piece if not there]
        )

    def reset(self) -> control_pb2.PrefixDelta:
        """The first piece of a full account; `take` gives the rest."""
        self._untold = dict.fromkeys(self._keys, True)
        delta = self.take()
        delta.reset = True
        return delta


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        # UNAVAILABLE's details are of the socket, and differ each time.
        code = error.code()
        return code.name if code is grpc.StatusCode.UNAVAILABLE else f"{code.name}: {error.details()}"
    return str(error) or "no answer"


class Registration:
    """Keeps a node registered, for ever: after a lost stream it registers again, with everything it holds.

    A session on the stream, seen from the node (`sequence` counts from 1 without gaps in each session):

        registration -> load -> prefixes(reset) [-> prefixes ...] -> { load every heartbeat_s | prefixes on change } ...
        ... -> leave
                     <- Joined <- StorageView             <- { StorageView | EvictPrefixes | Resync } ...

    `Resync` is answered with a load and a full account of the prefixes. What the node has to act upon is put on
    `directives`. An answer with an older `control_epoch` than the newest seen comes from a control plane that
    was replaced: it is dropped and the session ends. All methods belong to the event loop's thread.
    """

    def __init__(self, config: NodeConfig, node: control_pb2.Node, load: Callable[[], control_pb2.Load]) -> None:
        self.directives: asyncio.Queue[control_pb2.JoinResponse] = asyncio.Queue()
        """`storage` and `evict` directives, in order, fenced; at most MAX_DIRECTIVES."""
        self.control_epoch = 0
        """Newest epoch seen; 0 before the first registration."""
        self._config = config
        self._node = node
        self._load = load
        self._prefixes = _Prefixes()
        self._changed = asyncio.Event()  # prefixes changed, a resync is due, or the node leaves
        self._resync = False
        self._leaving = False
        self._registered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to register; `registered` says when it has happened."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"registration of {self._node.node_id}")

    async def stop(self, *, leave: bool = True) -> None:
        """Leave the cluster in good order, or cut the stream if the control plane does not answer. Idempotent.

        leave: False cuts the stream in any case, as the death of the process would: the control plane counts what
        comes after a leave as a new node, and what comes after a broken stream as a restart.
        """
        task, self._task = self._task, None
        if task is None:
            return
        if leave and self._registered.is_set():
            self._leaving = True
            self._changed.set()
            await asyncio.wait([task], timeout=self._config.join_deadline_s)
        task.cancel()
        await asyncio.wait([task])
        self._registered.clear()

    async def registered(self, timeout_s: float) -> None:
        """Wait until the control plane has taken the registration. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._registered.wait()

    def publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Keys that entered and left the node's tree. Never blocks; what waits to be told is kept as the net change."""
        self._prefixes.update(added, removed)
        if self._prefixes:
            self._changed.set()

    async def _run(self) -> None:
        wait_s = self._config.reconnect_min_s
        logged = ""
        while not self._leaving:
            reason = ""
            try:
                await self._session()
            except (grpc.aio.AioRpcError, _SessionLost, TimeoutError) as error:
                reason = _reason(error)
            except Exception:
                # The node's own load report failed, say. The cluster sees the node as gone until it works again.
                logger.exception("%s: registration failed", self._node.node_id)
            if self._registered.is_set():
                self._registered.clear()
                wait_s = self._config.reconnect_min_s
                logged = ""
            if reason not in ("", logged):  # Once, not at every attempt.
                where = self._config.control_address
                logger.warning("%s: not registered at %s: %s", self._node.node_id, where, reason)
                logged = reason
            if not self._leaving:
                # Spread, so that a restarted control plane is not met by every node at the same instant.
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(wait_s * 2, self._config.reconnect_max_s)

    async def _session(self) -> None:
        """One stream, from registration until it ends or the node leaves."""
        async with connect(self._config.control_address) as channel:
            call = control_pb2_grpc.ControlServiceStub(channel).Join()
            receiver: asyncio.Task[None] | None = None
            try:
                numbers = itertools.count(1)
                await self._write(call, control_pb2.JoinRequest(sequence=next(numbers), registration=self._node))
                async with asyncio.timeout(self._config.join_deadline_s):
                    self._accept(await call.read())
                receiver = asyncio.create_task(self._receive(call))
                await self._report(call, numbers, receiver)
                if self._leaving:
                    # Said rather than shown by closing: the other end cannot tell a closed stream from a broken one.
                    await self._write(call, control_pb2.JoinRequest(sequence=next(numbers), leave=control_pb2.Leave()))
                    await call.done_writing()
                await receiver
            finally:
                call.cancel()
                if receiver is not None:
                    receiver.cancel()
                    await asyncio.gather(receiver, return_exceptions=True)

    async def _report(
        self, call: grpc.aio.StreamStreamCall, numbers: Iterator[int], receiver: asyncio.Task[None]
    ) -> None:
        """Write loads and prefixes until the node leaves or the call has ended."""
        loop = asyncio.get_running_loop()
        self._resync = True
        heartbeat_at = loop.time()
        while not (self._leaving or receiver.done()):
            self._changed.clear()
            reports: list[control_pb2.JoinRequest] = []
            if self._resync or loop.time() >= heartbeat_at:
                heartbeat_at = loop.time() + self._config.heartbeat_s
                reports.append(control_pb2.JoinRequest(load=self._load()))
            if self._resync:
                self._resync = False
                reports.append(control_pb2.JoinRequest(prefixes=self._prefixes.reset()))
            elif self._prefixes:
                reports.append(control_pb2.JoinRequest(prefixes=self._prefixes.take()))
            for report in reports:
                report.sequence = next(numbers)
                if not await self._write(call, report):
                    return
            if self._prefixes:
                continue
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait(
                    [changed, receiver], timeout=heartbeat_at - loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                changed.cancel()

    async def _receive(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            response = await call.read()
            if response is grpc.aio.EOF and self._leaving:
                return
            self._accept(response)

    def _accept(self, response: control_pb2.JoinResponse) -> None:
        """Take one answer (or the end of the stream). Raises _SessionLost if the session must not go on."""
        if response is grpc.aio.EOF:
            raise _SessionLost("the control plane closed the stream")
        if response.control_epoch < self.control_epoch:
            raise _SessionLost(f"control epoch {response.control_epoch} is older than {self.control_epoch}")
        self.control_epoch = response.control_epoch
        match response.WhichOneof("directive"):
            case "joined":
                self._registered.set()
                logger.info("%s: registered, control epoch %d", self._node.node_id, self.control_epoch)
            case "resync":
                self._resync = True
                self._changed.set()
            case "storage" | "evict":
                if self.directives.qsize() >= MAX_DIRECTIVES:
                    dropped = self.directives.get_nowait().WhichOneof("directive")
                    logger.warning("%s: a %s directive was dropped: nobody takes them", self._node.node_id, dropped)
                self.directives.put_nowait(response)
            case unknown:
                logger.warning("%s: a directive of a newer kind was ignored: %s", self._node.node_id, unknown)

    async def _write(self, call: grpc.aio.StreamStreamCall, request: control_pb2.JoinRequest) -> bool:
        """False if the call has ended: reading from it tells why. Raises TimeoutError if nobody takes the message."""
        try:
            async with asyncio.timeout(self._config.join_deadline_s):
                await call.write(request)
        except asyncio.InvalidStateError:
            return False
        return True
