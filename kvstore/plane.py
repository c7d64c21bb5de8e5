"""The page plane of one worker:

its region of memory, the pool in it, and the transport that reaches others' regions.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.pages import PageCache, PageLayout, allocate_region, page_digests
from kvstore.pull_stats import PullStats
from kvstore.transport import (
    Card,
    DigestsReady,
    EventSink,
    Pull,
    PullSettled,
    TransportEvent,
    TransportFailed,
    TransportThread,
    create_transport,
)

_OWN_PULL_IDS = 1 << 40
"""Pulls of the plane itself (pages from storage nodes) are numbered from here; the core's numbers stay far below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneConfig:
    """The memory of one worker."""

    pool_bytes: int
    """For pages; rounded down to whole ones."""
    staging_bytes: int = 64 << 20
    """For encoded pages on their way in from storage nodes."""
    transports: tuple[str, ...] = ("nixl",)
    """Ways in which the region can be reached and reaches others, best first."""

    def __post_init__(self) -> None:
        for name in ("pool_bytes", "staging_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


class PagePlane:
    """Region layout: `[pool: num_pages * page_bytes][staging]`, all of it registered with the transport.

    The pool belongs to the step loop (by `cache`), the staging area to `kvstore/stored_pages.py`. Events of pulls that
    were submitted by `submit` go to `events`, those of `pull` to their caller.
    """

    def __init__(self, layout: PageLayout, config: PlaneConfig, incarnation: str, events: EventSink) -> None:
        num_pages = config.pool_bytes // layout.page_bytes
        if num_pages < 1:
            raise ValueError(f"pool_bytes {config.pool_bytes} holds no page of {layout.page_bytes} bytes")
        self.layout = layout
        self.pool_bytes = num_pages * layout.page_bytes
        self.region = allocate_region(self.pool_bytes + config.staging_bytes)
        self.cache = PageCache(layout, self.region, num_pages)
        self.incarnation = incarnation
        self.stats = PullStats()
        self._card: Card | None = None
        self._failure: Future[str] = Future()
        self._events = events
        self._own: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[PullSettled]]] = {}
        self._num_pages: dict[int, int] = {}
        self._lock = threading.Lock()
        self._next_id = _OWN_PULL_IDS
        self._thread = TransportThread(
            lambda: create_transport(config.transports, self.region, incarnation), events=_Sink(self)
        )

    def start(self) -> None:
        """Register the region; blocks for seconds."""
        self._card = self._thread.start()

    @property
    def card(self) -> Card:
        """How others reach the region, once started."""
        assert self._card is not None
        return self._card

    @property
    def failure(self) -> str | None:
        """Why nothing can be pulled any more, once the transport has ended by itself."""
        return self._failure.result() if self._failure.done() else None

    async def wait_failed(self) -> str:
        """Until the transport has ended by itself, which a sound one never does; the reason."""
        return await asyncio.shield(asyncio.wrap_future(self._failure))

    def close(self) -> None:
        """Settle every pull and unregister. Blocks for up to some seconds; idempotent."""
        self._thread.close()

    def submit(self, pull: Pull) -> None:
        """Post a pull into the pool, for the step loop; each extent is one page."""
        with self._lock:
            self._num_pages[pull.pull_id] = len(pull.num_bytes)
        self._thread.submit(pull)

    def stop(self, pull_id: int) -> None:
        """Post nothing further of it. It still settles."""
        self._thread.cancel(pull_id)

    def forget(self, incarnation: str) -> None:
        """That process is gone: what is still pulled from it settles with an error."""
        self._thread.forget(incarnation)

    async def pull(
        self,
        card: Card,
        remote_offsets: Sequence[int],
        local_offsets: Sequence[int],
        num_bytes: Sequence[int],
        *,
        deadline_s: float,
    ) -> PullSettled:
        """Pull extents and wait until nothing of them lands any more, which can be long after the deadline.

        Offsets are bytes from the start of the regions; `deadline_s` is an instant of `boot_time_s`. The wait must not
        be cancelled: shield it.
        """
        # Before anything waits: what the wire says may not fit into an offset.
        remote, local, sizes = (np.asarray(each, dtype=np.int64) for each in (remote_offsets, local_offsets, num_bytes))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PullSettled] = loop.create_future()
        with self._lock:
            self._next_id += 1
            pull_id = self._next_id
            self._own[pull_id] = (loop, future)
            self._num_pages[pull_id] = len(num_bytes)
        self._thread.submit(
            Pull(
                pull_id=pull_id,
                card=card,
                remote_offsets=remote,
                local_offsets=local,
                num_bytes=sizes,
                deadline_s=deadline_s,
            )
        )
        return await future

    def digests(self, pages: Sequence[int]) -> npt.NDArray[np.uint64]:
        """uint64 [n, num_kv_heads] of pages whose values are final. About 0.1 ms per 400 kB: not for an event loop."""
        if not pages:
            return np.empty((0, self.layout.num_kv_heads), dtype=np.uint64)
        rows = [page_digests(self.cache.pages[page : page + 1], self.layout.num_kv_heads)[0] for page in pages]
        return np.stack(rows)

    def _take(self, event: TransportEvent) -> None:
        """On the transport thread."""
        if isinstance(event, DigestsReady):
            raise TypeError("the plane asks for no digests")
        if isinstance(event, TransportFailed):
            self._failure.set_result(event.reason)
            return
        if isinstance(event, PullSettled):
            self._count(event)
        with self._lock:
            own = self._own.get(event.pull_id)
            if isinstance(event, PullSettled):
                self._own.pop(event.pull_id, None)
        if own is None:
            self._events.put(event)
        elif isinstance(event, PullSettled):
            loop, future = own
            loop.call_soon_threadsafe(_resolve, future, event)

    def _count(self, event: PullSettled) -> None:
        with self._lock:
            num_pages = self._num_pages.pop(event.pull_id, 0)
        self.stats.settled(event, num_pages)


class _Sink:
    """The transport thread's way back to the plane."""

    def __init__(self, plane: PagePlane) -> None:
        self._plane = plane

    def put(self, event: TransportEvent, /) -> None:
        self._plane._take(event)


def _resolve(future: asyncio.Future[PullSettled], event: PullSettled) -> None:
    if not future.done():
        future.set_result(event)
