"""Runs a store: carries out what it decides, and tells it what happened and what time it is."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvstore.codecs import Bytes
from kvstore.node.decisions import DigestExtents, Encoding, Lent, OfferedPage, OfferPlan, PlannedPull, Written
from kvstore.node.store import Store
from kvstore.pages import PageLayout, bytes_digest
from kvstore.pull_stats import PullStats
from kvstore.transport import (
    Card,
    DigestsReady,
    PageTransport,
    Pull,
    PullExpired,
    PullSettled,
    TransportEvent,
    TransportFailed,
    TransportThread,
    boot_time_s,
)

logger = logging.getLogger(__name__)

_ENCODER_NICENESS = 10
"""Of the encoding thread: on a small machine the workers' steps come first."""


class Keeper:
    """A store with a transport, a clock and an encoder. Belongs to one event loop.

    An offer: plan, pull, settled, digests of the stored bytes, the pages count. Encoding takes one page at a time, on a
    thread of its own.
    """

    def __init__(
        self,
        store: Store,
        make_transport: Callable[[], PageTransport],
        publish: Callable[[Sequence[bytes], Sequence[bytes]], None],
    ) -> None:
        """make_transport: over the arena's region; called on the transport's thread.
        publish: takes the keys that entered and left the index.
        """
        self.store = store
        self.stats = PullStats()
        self._num_pages: dict[int, int] = {}  # of the pulls that have not settled
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = self._loop.create_future()
        """Why pages can be neither taken nor read any more, once the transport has ended by itself."""
        self._transport = TransportThread(make_transport, events=_Inbox(self._loop, self._transport_event))
        self._encoder = ThreadPoolExecutor(1, "encoder", initializer=_be_nice)
        self._encoding: asyncio.Task[None] | None = None
        self._has_raw = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[Written]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> Card:
        """Register the region; takes seconds. Returns how others reach it."""
        card = await asyncio.to_thread(self._transport.start)
        self._encoding = asyncio.create_task(self._encode(), name="write-behind")
        self._encoding.add_done_callback(_log_failure)
        return card

    async def close(self) -> None:
        """Settle every pull, by force if need be, and unregister the region. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._encoding is not None:
            self._encoding.cancel()
            await asyncio.wait([self._encoding])
        # Both may be in the middle of a page; the region outlives them.
        await asyncio.to_thread(self._encoder.shutdown)
        await asyncio.to_thread(self._transport.close)
        for future in self._waiting.values():
            future.cancel()

    def match(self, keys: Sequence[bytes], lease_s: float, now_s: float) -> Lent:
        lent = self.store.match(keys, lease_s, now_s)
        self._after()
        return lent

    def release(self, lease_id: str) -> bool:
        released = self.store.release(lease_id, boot_time_s())
        self._after()
        return released

    async def offer(
        self, card: Card, pages: Sequence[OfferedPage], layout: PageLayout, deadline_s: float
    ) -> tuple[OfferPlan, Written | None]:
        """Take what is wanted of an offer. Returns when nothing of it is read any more, or its deadline has passed.

        Cancelled, it abandons the pull: what lands is discarded.
        """
        plan = self.store.offer(pages, layout, deadline_s, boot_time_s())
        self._after()
        if plan.pull is None:
            return plan, None
        write_id = plan.pull.write_id
        future = self._waiting[write_id] = self._loop.create_future()
        try:
            self._num_pages[write_id] = len(plan.pull.pages)
            self._transport.submit(_pull(plan.pull, card, deadline_s))
            return plan, await future
        finally:
            del self._waiting[write_id]
            if not future.done() or future.cancelled():
                self.store.abandon(write_id)
                self._transport.cancel(write_id)

    # -- what happens outside --------------------------------------------------------------------------------------

    def _transport_event(self, event: TransportEvent) -> None:
        match event:
            case PullExpired():
                self._expire()
            case PullSettled():
                self.stats.settled(event, self._num_pages.pop(event.pull_id))
                outcome = self.store.pull_settled(event.pull_id, event.error, event.mismatched)
                if isinstance(outcome, Written):
                    self._finished(outcome)
                elif not self._closed:
                    self._digest(outcome)
            case DigestsReady():
                assert isinstance(event.tag, int)
                self._finished(self.store.digested(event.tag, event.digests[:, 0].tolist()))
            case TransportFailed():
                self.failed.set_result(event.reason)
        self._after()

    def _digest(self, order: DigestExtents) -> None:
        offsets = np.array([extent.offset_bytes for extent in order.extents], dtype=np.int64)
        num_bytes = np.array([extent.num_bytes for extent in order.extents], dtype=np.int64)
        self._transport.digests(offsets, num_bytes, 1, order.write_id)

    def _finished(self, written: Written) -> None:
        future = self._waiting.get(written.write_id)
        if future is not None and not future.done():
            future.set_result(written)

    # -- time ------------------------------------------------------------------------------------------------------

    def _after(self) -> None:
        """After anything that the store was told: pass on what changed, and wake up when the next thing is due."""
        added, removed = self.store.drain_changes()
        if added or removed:
            self._publish(added, removed)
        if added:
            self._has_raw.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.store.next_deadline_s()
        if due_s is not None and not self._closed:
            # The loop's clock stops while the machine sleeps and the store's does not: then this is late, once.
            self._timer = self._loop.call_later(max(0.0, due_s - boot_time_s()), self._expire)

    def _expire(self) -> None:
        # The transport keeps the same deadline and posts nothing further by itself.
        for written in self.store.expire(boot_time_s()):
            self._finished(written)
        self._after()

    # -- write-behind ----------------------------------------------------------------------------------------------

    async def _encode(self) -> None:
        while True:
            await self._has_raw.wait()
            self._has_raw.clear()
            while (encoding := self.store.next_encoding()) is not None:
                try:
                    stored, digest = await self._loop.run_in_executor(self._encoder, _encoded, encoding)
                except Exception:
                    # The page stays raw, and the node goes on.
                    logger.exception("a page of %d bytes was not encoded", len(encoding.page))
                    self.store.encoded(encoding.encoding_id, None, 0)
                else:
                    self.store.encoded(encoding.encoding_id, stored, digest)
                self._after()


class _Inbox:
    """Brings the transport thread's events to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[TransportEvent], None]) -> None:
        self._loop = loop
        self._handle = handle

    def put(self, event: TransportEvent, /) -> None:
        self._loop.call_soon_threadsafe(self._handle, event)


def _pull(plan: PlannedPull, card: Card, deadline_s: float) -> Pull:
    return Pull(
        pull_id=plan.write_id,
        card=card,
        remote_offsets=np.array([page.offset_bytes for page in plan.pages], dtype=np.int64),
        local_offsets=np.array([extent.offset_bytes for extent in plan.extents], dtype=np.int64),
        num_bytes=np.array([page.num_bytes for page in plan.pages], dtype=np.int64),
        deadline_s=deadline_s,
        expected=np.array([page.digests for page in plan.pages], dtype=np.uint64),
    )


def _encoded(encoding: Encoding) -> tuple[Bytes, int]:
    stored = np.frombuffer(encoding.codec.encode(encoding.page, encoding.layout), dtype=np.uint8)
    return stored, bytes_digest(stored)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s has ended", task.get_name(), exc_info=error)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _ENCODER_NICENESS)
