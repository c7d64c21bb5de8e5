"""Keeps a view of the cluster up to date with the control plane's `Watch` stream."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import grpc

from cluster.view import ClusterView
from protos import control_pb2, control_pb2_grpc
from protos.serving import connect

logger = logging.getLogger(__name__)


class Watcher:
    """Feeds a view from the control plane's `Watch` stream, for ever: after a lost stream it asks again.

    While the control plane is away the view stays as it was. All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        view: ClusterView,
        control_address: str,
        watcher: str,
        *,
        snapshot_deadline_s: float = 5.0,
        reconnect_min_s: float = 0.1,
        reconnect_max_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """snapshot_deadline_s: how long a control plane that took the call may be silent before its first message."""
        self.view = view
        self.connected = False
        """Whether a stream is open and its snapshot has come."""
        self._address = control_address
        self._watcher = watcher
        self._snapshot_deadline_s = snapshot_deadline_s
        self._reconnect_min_s = reconnect_min_s
        self._reconnect_max_s = reconnect_max_s
        self._clock = clock
        self.change = asyncio.Event()
        """Set when a node comes or goes, or starts or stops being ready; then a fresh one takes its place."""
        self._task: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begin to watch. Does not wait for the control plane."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"watch of {self._address}")

    async def stop(self) -> None:
        """Stop watching; the view stays as it is. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self._expiry is not None:
            self._expiry.cancel()

    async def _run(self) -> None:
        wait_s = self._reconnect_min_s
        logged = ""
        while True:
            failed = False
            try:
                await self._session()
                reason = "the control plane closed the stream"
            except grpc.aio.AioRpcError as error:
                reason = error.code().name
            except TimeoutError:
                reason = "no snapshot"
            except Exception as error:
                # A message that the view cannot take, say. A fresh snapshot mends what it left half done.
                logger.exception("watching the control plane at %s failed", self._address)
                reason, failed = type(error).__name__, True
            if self.connected:
                self.connected = False
                if not failed:  # Else the next attempt may fail as quickly, and as often as it is made.
                    wait_s = self._reconnect_min_s
                    logged = ""
            if reason != logged:
                logger.warning("no news from the control plane at %s, its last view is kept: %s", self._address, reason)
                logged = reason
            # Spread, so that a restarted control plane is not met by every gateway at the same instant.
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, self._reconnect_max_s)

    async def _session(self) -> None:
        async with connect(self._address) as channel:
            call = control_pb2_grpc.ControlServiceStub(channel).Watch(control_pb2.WatchRequest(watcher=self._watcher))
            try:
                async with asyncio.timeout(self._snapshot_deadline_s):
                    response = await call.read()
                while response is not grpc.aio.EOF:
                    if not self._apply(response):
                        return
                    self.connected = True
                    response = await call.read()
            finally:
                call.cancel()

    def _apply(self, response: control_pb2.WatchResponse) -> bool:
        version = self.view.placement_version
        taken = self.view.apply(response, self._clock())
        if not taken:
            logger.warning("control epoch %d is older than %d", response.control_epoch, self.view.control_epoch)
        self._announce(version)
        self._await_expiry()
        return taken

    def _await_expiry(self) -> None:
        since_s = [
            node.unconfirmed_since_s for node in self.view.nodes.values() if node.unconfirmed_since_s is not None
        ]
        if since_s and self._expiry is None:
            delay_s = max(0.0, min(since_s) + self.view.forget_after_s - self._clock())
            self._expiry = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        version = self.view.placement_version
        self.view.expire(self._clock())
        self._announce(version)
        self._await_expiry()

    def _announce(self, version: int) -> None:
        if self.view.placement_version != version:
            self.change.set()
            self.change = asyncio.Event()
