"""The control plane as a process: takes the lock, listens, keeps the durable facts, and stops when it is replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc

from cluster.catalog import AuditEntry, Catalog, CatalogCorrupt, CatalogUnavailable, ControlLockHeld, Fenced, Placement
from cluster.control.config import ControlConfig
from cluster.control.degradations import Degradations
from cluster.control.service import ControlService
from cluster.control.state import ClusterState
from cluster.spec import without_password
from protos import control_pb2, control_pb2_grpc
from protos.serving import Server, serve

logger = logging.getLogger(__name__)

SERVICE = "headrace.v1.ControlService"
ROSTER_INTERVAL_S = 0.2
"""Seconds between two looks at whether the roster has to be stored."""
RECLAIM_INTERVAL_S = 0.5
"""Seconds between two looks at whether the port of the control plane before is free."""


class ControlPlane:
    """Registers nodes, watches over them, and tells everybody who is there.

        start: lock + fencing epoch -> facts of the one before -> listen (on its port, if free) -> serving
        serving: renew the lock | tick the state | store the roster        each in a task of its own
        replaced by a newer epoch, or a task fails: all streams end, `wait_ended` returns
        stop: streams end, the roster is stored, the lock is given back

    While the catalog does not answer, everything goes on but what has to be recorded: that is refused.
    """

    def __init__(self, config: ControlConfig) -> None:
        self.address = ""
        """host:port of the gRPC listener, after `start`."""
        self._config = config
        self._holder = f"{platform.node()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._catalog = Catalog.open(config.catalog_url, cluster=config.cluster, deadline_s=config.catalog_deadline_s)
        self._placement: Placement | None = None
        self._degradations = Degradations()
        self._own: dict[str, str] = {}  # The control plane's own degradations, consequence by kind.
        self._state: ClusterState | None = None
        self._service: ControlService | None = None
        self._servers: list[Server] = []
        self._started_unix_s = 0.0
        self._stored_version = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[str] | None = None

    async def start(self) -> None:
        """Returns when it serves.

        Raises ControlLockHeld if another control plane keeps the lock, CatalogUnavailable if the catalog does not
        answer, CatalogCorrupt if the facts there are not ours, OSError if `port` is named and taken.
        """
        self._ended = asyncio.get_running_loop().create_future()
        try:
            epoch = await self._take_lock()
            roster = await self._catalog.roster()
            await self._read_placement()
            self._state = ClusterState(
                control_epoch=epoch, silence_s=self._config.silence_s, now_s=time.monotonic(), roster=roster
            )
            self._service = ControlService(self._state, record=self._record, status=self.status)
            await self._listen(self._service, await self._catalog.control_address())
            await self._catalog.set_control_address(self.address, epoch=epoch)
        except BaseException:
            await self.stop()
            raise
        self._started_unix_s = time.time()
        self._spawn("lock", self._keep_lock(self._state))
        self._spawn("tick", self._tick(self._state, self._service))
        self._spawn("roster", self._keep_roster(self._state))
        logger.info("control plane of %s at %s, epoch %d", self._config.cluster, self.address, epoch)

    async def stop(self) -> None:
        """End all streams, store what is known, give the lock back. Nodes stay in the roster. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_streams("the control plane stops")
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(self._config.grace_s) for server in servers))
        try:
            if self._state is not None and self._state.roster_version != self._stored_version:
                await self._store_roster(self._state)
            await self._catalog.release_control(self._holder)
        except (CatalogUnavailable, Fenced) as error:
            logger.warning("the last changes were not stored: %s", error)
        await self._catalog.close()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result("stopped")

    async def wait_ended(self) -> str:
        """Wait until it no longer acts: it was stopped, replaced by a newer one, or has failed. Returns why.

        Whoever runs it calls `stop` then, and decides whether to start another.
        """
        assert self._ended is not None, "not started"
        return await asyncio.shield(self._ended)

    def status(self) -> control_pb2.GetStatusResponse:
        """What `GetStatus` answers; nodes in the order of their ids, without their prefixes."""
        state = self._state
        assert state is not None, "not started"
        return control_pb2.GetStatusResponse(
            control_epoch=state.control_epoch,
            cluster=self._config.cluster,
            started_unix_s=self._started_unix_s,
            nodes=[record.state() for _, record in sorted(state.records.items())],
            degradations=self._current_degradations(state),
            membership_epoch=state.membership_epoch,
            catalog=without_password(self._config.catalog_url),
            restarts=state.restarts(),
        )

    # Start and end.

    async def _take_lock(self) -> int:
        """The fencing epoch, as soon as the catalog answers and the lock is free; raises what was in the way."""
        give_up_s = time.monotonic() + self._config.start_deadline_s
        while True:
            try:
                return await self._catalog.acquire_control(self._holder, ttl_s=self._config.lock_ttl_s)
            except ControlLockHeld as error:
                wait_s = min(error.expires_in_s + 0.01, self._config.lock_ttl_s)
                reason: ControlLockHeld | CatalogUnavailable = error
            except CatalogUnavailable as error:
                wait_s = 0.1
                reason = error
            if time.monotonic() + wait_s > give_up_s:
                raise reason
            logger.info("waiting to take over: %s", reason)
            await asyncio.sleep(wait_s)

    async def _listen(self, service: ControlService, previous: str | None) -> None:
        """Listen where the nodes look for the control plane, if that is possible."""
        host, port = self._config.host, self._config.port
        known = int(previous.rpartition(":")[2]) if previous is not None and port == 0 else None
        if known is not None and _is_free(host, known):
            port = known
        self.address = await self._serve(service, port)
        if port != known and known is not None:
            # Most likely the one before is frozen rather than dead, and has its port until it wakes and sees its end.
            logger.warning("port %d is taken: nodes that look for the control plane there do not find it", known)
            self._own["control-moved"] = f"nodes that look for the control plane at port {known} do not find it"
            self._spawn("port", self._reclaim(service, known))

    async def _reclaim(self, service: ControlService, port: int) -> None:
        """Listen at `port` too, as soon as it is free."""
        while True:
            await asyncio.sleep(RECLAIM_INTERVAL_S)
            if _is_free(self._config.host, port):
                await self._serve(service, port)
                self._own.pop("control-moved")
                logger.info("port %d is ours again", port)
                return

    async def _serve(self, service: ControlService, port: int) -> str:
        def register(server: grpc.aio.Server) -> Sequence[str]:
            control_pb2_grpc.add_ControlServiceServicer_to_server(service, server)
            return [SERVICE]

        server = await serve(register, host=self._config.host, port=port)
        self._servers.append(server)
        await server.set_ready(True)
        return server.address

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"control plane: {name}")
        task.add_done_callback(self._task_done)
        self._tasks.append(task)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, Fenced):
            logger.error("this control plane stops acting: %s", error)
        else:
            logger.error("%s has failed", task.get_name(), exc_info=error)
        reason = str(error)
        self._close_streams(reason)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    def _close_streams(self, reason: str) -> None:
        if self._service is not None:
            self._service.close(reason)

    # Tasks.

    async def _keep_lock(self, state: ClusterState) -> None:
        """Renews the lock, and reads what the operator wants. Raises Fenced once another one has taken over."""
        epoch = state.control_epoch
        while True:
            await asyncio.sleep(self._config.lock_ttl_s / 3)
            try:
                renewal = await self._catalog.renew_control(self._holder, epoch, ttl_s=self._config.lock_ttl_s)
                if renewal == "restored":
                    await self._restore(state)
                await self._read_placement()
                self._own.pop("catalog-unreachable", None)
            except CatalogUnavailable as error:
                if "catalog-unreachable" not in self._own:
                    logger.warning("the catalog does not answer: %s", error)
                self._own["catalog-unreachable"] = "requests go on; what an operator changes is refused"

    async def _read_placement(self) -> None:
        """What cannot be read is stated, and the last that could be stays: others write it, they may write nonsense."""
        try:
            self._placement = await self._catalog.placement()
            self._own.pop("catalog-corrupt", None)
        except CatalogCorrupt as error:
            if "catalog-corrupt" not in self._own:
                logger.error("%s", error)
            self._own["catalog-corrupt"] = f"{error}; what was wanted before goes on"

    async def _restore(self, state: ClusterState) -> None:
        """The catalog has lost its data: what this process knows is all there is."""
        logger.warning("the catalog has lost its data; what is known here is stored again")
        if self._placement is not None:
            await self._catalog.set_placement(self._placement, actor="control plane")
        await self._catalog.set_control_address(self.address, epoch=state.control_epoch)
        await self._store_roster(state)

    async def _tick(self, state: ClusterState, service: ControlService) -> None:
        interval_s = min(0.25, self._config.silence_s / 5)
        while True:
            await asyncio.sleep(interval_s)
            service.deliver(state.tick(time.monotonic(), interval_s))
            self._current_degradations(state)  # So that each has its since-when, asked for or not.

    async def _keep_roster(self, state: ClusterState) -> None:
        """Stores the roster whenever it has changed; changes that come close together are stored once."""
        while True:
            await asyncio.sleep(ROSTER_INTERVAL_S)
            if state.roster_version != self._stored_version:
                try:
                    await self._store_roster(state)
                except CatalogUnavailable as error:
                    logger.debug("the roster is stored later: %s", error)

    async def _store_roster(self, state: ClusterState) -> None:
        version = state.roster_version
        await self._catalog.store_roster(state.roster(), epoch=state.control_epoch)
        self._stored_version = version

    # Facts.

    async def _record(self, action: str, details: str, actor: str) -> None:
        assert self._state is not None
        entry = AuditEntry(actor=actor, action=action, details=details)
        await self._catalog.record(entry, epoch=self._state.control_epoch)

    def _current_degradations(self, state: ClusterState) -> list[control_pb2.Degradation]:
        return self._degradations.current(state.records, self._placement, self._own, time.time())


def _is_free(host: str, port: int) -> bool:
    """Whether a listener could be bound there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
