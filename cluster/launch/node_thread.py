"""A node in an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from cluster.launch.build import EndingNode, Node

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The node serves."""

    address: str
    """host:port of its gRPC listener."""
    http_address: str
    """Of its HTTP listener; empty if it has none."""
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFailed:
    """The node could not be built, or its `start` raised."""

    reason: str
    """One line."""
    details: str
    """The traceback."""


class NodeEnded(Exception):
    """The node found that it is of no use any more; the text is its reason."""


class NodeThread:
    """Builds a node, starts it, and keeps it until it is stopped.

    (new) --start--> starting --ok--> serving --stop--> stopping --> stopped
                         |               |                  '--error--.
                         |               '--the node ends by itself----+--> ended: `on_error` is called
                         '--error--> failed
    """

    def __init__(self, node_id: str, build: Callable[[], Node], on_error: Callable[[], None]) -> None:
        """build: makes the node, on the thread. on_error: called there once nothing can be done for a node any more."""
        self._node_id = node_id
        self._build = build
        self._on_error = on_error
        self._outcome: Started | StartFailed | None = None
        self._settled = threading.Event()
        self._stopped = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"node {node_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def outcome(self) -> Started | StartFailed:
        """Wait until the node has started or failed to. It bounds itself: every node's start has deadlines."""
        self._settled.wait()
        assert self._outcome is not None
        return self._outcome

    def answers(self, deadline_s: float) -> bool:
        """Whether the node's event loop runs a callback within `deadline_s`. True before and after its life."""
        if self._loop is None or self._stopped.is_set():
            return True
        ran = threading.Event()
        try:
            self._loop.call_soon_threadsafe(ran.set)
        except RuntimeError:  # closed meanwhile
            return True
        return ran.wait(deadline_s)

    def stop(self, deadline_s: float) -> bool:
        """Stop the node in good order; says whether it managed within `deadline_s`. Idempotent."""
        if self._loop is not None and self._stop_asked is not None and not self._stopped.is_set():
            try:
                self._loop.call_soon_threadsafe(self._stop_asked.set)
            except RuntimeError:  # closed meanwhile
                pass
        return self._stopped.wait(deadline_s)

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException:
            logger.exception("node %s ended", self._node_id)
            self._on_error()
        finally:
            self._stopped.set()

    async def _serve(self) -> None:
        self._stop_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        node = await self._start()
        self._settled.set()
        if node is None:
            return
        stop_asked = asyncio.create_task(self._stop_asked.wait())
        ended = asyncio.create_task(node.wait_ended()) if isinstance(node, EndingNode) else None
        await asyncio.wait([task for task in (stop_asked, ended) if task], return_when=asyncio.FIRST_COMPLETED)
        await node.stop()
        if not self._stop_asked.is_set() and ended is not None:
            raise NodeEnded(await ended)
        logger.info("node %s stopped", self._node_id)

    async def _start(self) -> Node | None:
        """The node, serving; or None, with the reason in `_outcome`."""
        begun_s = time.monotonic()
        node: Node | None = None
        try:
            node = self._build()
            await node.start()
        except Exception as error:
            logger.exception("node %s did not start", self._node_id)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._outcome = StartFailed(reason=reason, details=traceback.format_exc())
            if node is not None:
                await node.stop()
            return None
        logger.info("node %s serves at %s after %.1f s", self._node_id, node.address, time.monotonic() - begun_s)
        self._outcome = Started(address=node.address, http_address=getattr(node, "http_address", ""), pid=os.getpid())
        return node
