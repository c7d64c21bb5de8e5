"""The transport thread: owns a page transport; commands go in, events come out.

It sleeps in the command queue while nothing is in flight, so an idle worker costs nothing here. While something is, it
polls, and each pause is a fixed share of the time since something last happened: a short pull is noticed at once, one
that waits for a frozen peer costs a few wake-ups per second.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.pages.digest import page_digests
from kvstore.transport.base import (
    CANCELLED,
    CLOSED,
    EXPIRED,
    Card,
    PageTransport,
    Pull,
    PullExpired,
    PullSettled,
    SettledTransfer,
    Transfer,
    boot_time_s,
)

logger = logging.getLogger(__name__)

_PAUSE_SHARE = 1 / 8  # of the time since something last happened: the most that polling adds to a pull's latency
_PAUSE_MAX_S = 5e-3
_START_S = 60.0  # importing NIXL and registering a large region, on a loaded machine
_CLOSE_S = 2.0  # what close() waits for transfers to settle before it ends them by force


@dataclass(frozen=True, slots=True)
class DigestsReady:
    """The answer to `digests`."""

    tag: object
    digests: npt.NDArray[np.uint64]
    """[n, heads]"""


TransportEvent = PullExpired | PullSettled | DigestsReady


class EventSink(Protocol):
    """Where events go: a `queue.SimpleQueue`, or the inbox of a step loop. `put` must not block."""

    def put(self, event: TransportEvent, /) -> None: ...


@dataclass(slots=True, eq=False)
class _Active:
    """A pull that was begun and has not settled."""

    transfer: Transfer
    submitted_s: float
    verdict: str | None = None
    """EXPIRED, CANCELLED or CLOSED once one of them happened; the first one stays."""


@dataclass(slots=True)
class _Waiting:
    """What the threads share: pulls without their PullSettled, and whether more are taken."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pull_ids: set[int] = field(default_factory=set)
    closed: bool = False


class TransportThread:
    """Owns a PageTransport on one thread.

    Every submitted pull gets exactly one `PullSettled` in `events`, whatever happens to the peer, the pull or this
    object, and at most one `PullExpired` before it.
    """

    def __init__(
        self,
        make_transport: Callable[[], PageTransport],
        *,
        events: EventSink | None = None,
        close_s: float = _CLOSE_S,
    ) -> None:
        """make_transport: called on the new thread, which then owns what it returns.
        close_s: how long `close` waits for what is in flight before it ends it by force.
        """
        self.events: EventSink = queue.SimpleQueue[TransportEvent]() if events is None else events
        self._make_transport = make_transport
        self._close_s = close_s
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting = _Waiting()
        self._card: Future[Card] = Future()
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)
        # Below: touched by the owner thread only.
        self._active: dict[int, _Active] = {}
        self._closing = False

    # -- any thread ------------------------------------------------------------------------------------------------

    def start(self) -> Card:
        """Starts the thread and returns the card of its region. Raises what making the transport raised."""
        self._thread.start()
        return self._card.result(timeout=_START_S)

    def submit(self, pull: Pull) -> None:
        """Asks for a pull; never blocks. Raises ValueError if a pull with that id has not settled yet."""
        with self._waiting.lock:
            if pull.pull_id in self._waiting.pull_ids:
                raise ValueError(f"pull {pull.pull_id} has not settled yet")
            if not self._waiting.closed:
                self._waiting.pull_ids.add(pull.pull_id)
                submitted_s = time.monotonic()
                self._commands.put(lambda: self._begin(pull, submitted_s))
                return
        self.events.put(PullSettled(pull.pull_id, CLOSED, (), 0, 0.0, ""))

    def cancel(self, pull_id: int) -> None:
        """Stops posting for that pull: CANCELLED follows once what is in flight has landed. Ignores unknown ids."""
        self._commands.put(lambda: self._stop(pull_id, CANCELLED))

    def forget(self, incarnation: str) -> None:
        """That peer is gone: its connection is closed by force, and its pulls settle with an error."""
        self._commands.put(lambda: self._transport.forget(incarnation))

    def digests(
        self, offsets: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64], heads: int, tag: object
    ) -> None:
        """Computes the page digests of local extents on the thread; DigestsReady(tag, uint64 [n, heads]) follows.

        Nobody may write to the extents until then. Needs `start` first; after `close` the command is dropped.
        Raises ValueError for extents outside the region or of a size that `heads` does not divide.
        """
        limit_bytes = self._card.result(timeout=0).region_bytes
        if (offsets < 0).any() or (num_bytes < 0).any() or (offsets + num_bytes > limit_bytes).any():
            raise ValueError(f"an extent leaves the region of {limit_bytes} bytes")
        if heads < 1 or (num_bytes % heads).any():
            raise ValueError(f"{heads} heads do not divide every extent")
        self._commands.put(lambda: self._digest(offsets, num_bytes, heads, tag))

    def close(self) -> None:
        """Settles every pull, by force after `close_s`, closes the transport and ends the thread. Idempotent."""
        with self._waiting.lock:
            self._waiting.closed = True
        self._commands.put(self._begin_closing)
        if self._thread.ident is None:
            self._refuse_the_rest(CLOSED)
        else:
            self._thread.join()

    # -- the owner thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._transport = self._make_transport()
        except BaseException as error:
            self._card.set_exception(error)
            self._refuse_the_rest(f"no transport: {error}")
            return
        failure = CLOSED
        try:
            self._card.set_result(self._transport.card())
            self._loop()
        except Exception as error:
            # The edge of the thread: whoever waits for a pull must hear of it, and this worker can pull no more.
            logger.exception("the transport thread failed")
            failure = f"the transport thread failed: {error}"
        finally:
            try:
                self._transport.close()
            except Exception:
                logger.exception("the transport did not close")
            for active in list(self._active.values()):
                self._report(active, active.verdict or failure)
            self._refuse_the_rest(failure)

    def _loop(self) -> None:
        moved_s = time.monotonic()
        force_s = float("inf")
        while True:
            now_s = time.monotonic()
            if self._closing:
                force_s = min(force_s, now_s + self._close_s)
                if not self._active or now_s >= force_s:
                    return
            pause_s = min((now_s - moved_s) * _PAUSE_SHARE, _PAUSE_MAX_S) if self._active or self._closing else None
            if self._obey(pause_s) | self._advance():
                moved_s = time.monotonic()

    def _obey(self, pause_s: float | None) -> bool:
        """Runs the commands that are there, waiting up to `pause_s` for the first (None: as long as it takes)."""
        try:
            command = self._commands.get(timeout=pause_s)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return False

    def _advance(self) -> bool:
        """One round over the active pulls: at most one piece each, so that none keeps the others waiting."""
        moved = False
        for pull_id, active in list(self._active.items()):
            transfer = active.transfer
            if active.verdict is None and boot_time_s() > transfer.pull.deadline_s:
                self._stop(pull_id, EXPIRED)
            moved |= transfer.advance()
            if transfer.settled:
                self._settle(active)
        return moved

    def _begin(self, pull: Pull, submitted_s: float) -> None:
        expired = boot_time_s() > pull.deadline_s
        transfer = SettledTransfer(pull) if expired else self._transport.begin(pull)
        self._active[pull.pull_id] = _Active(transfer, submitted_s)

    def _stop(self, pull_id: int, verdict: str) -> None:
        active = self._active.get(pull_id)
        if active is None or active.verdict is not None:
            return
        active.verdict = verdict
        active.transfer.stop()
        if verdict == EXPIRED:
            self.events.put(PullExpired(pull_id))

    def _settle(self, active: _Active) -> None:
        late = boot_time_s() > active.transfer.pull.deadline_s
        self._report(active, active.verdict or active.transfer.error or (EXPIRED if late else None))

    def _report(self, active: _Active, error: str | None) -> None:
        pull, transfer = active.transfer.pull, active.transfer
        seconds = time.monotonic() - active.submitted_s
        mismatched = self._mismatched(pull) if error is None else ()
        del self._active[pull.pull_id]
        with self._waiting.lock:
            self._waiting.pull_ids.discard(pull.pull_id)
        self.events.put(PullSettled(pull.pull_id, error, mismatched, transfer.landed_bytes, seconds, transfer.path))

    def _mismatched(self, pull: Pull) -> tuple[int, ...]:
        if pull.expected is None:
            return ()
        heads = pull.expected.shape[1]
        extents = zip(pull.local_offsets.tolist(), pull.num_bytes.tolist(), strict=True)
        return tuple(
            index
            for index, (offset, size) in enumerate(extents)
            # A head count that does not divide the extent is nonsense from the wire, so no digest can be right.
            if size % heads or not np.array_equal(self._page_digests(offset, size, heads), pull.expected[index])
        )

    def _page_digests(self, offset: int, size: int, heads: int) -> npt.NDArray[np.uint64]:
        """uint64 [heads] of one local extent."""
        digests: npt.NDArray[np.uint64] = page_digests(self._transport.region[None, offset : offset + size], heads)[0]
        return digests

    def _digest(
        self, offsets: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64], heads: int, tag: object
    ) -> None:
        digests = np.empty((len(offsets), heads), dtype=np.uint64)
        for index, (offset, size) in enumerate(zip(offsets.tolist(), num_bytes.tolist(), strict=True)):
            digests[index] = self._page_digests(offset, size, heads)
        self.events.put(DigestsReady(tag, digests))

    def _begin_closing(self) -> None:
        self._closing = True
        for pull_id in self._active:
            self._stop(pull_id, CLOSED)

    def _refuse_the_rest(self, error: str) -> None:
        """Settles the pulls that were submitted and never begun, and from now on every new one at once."""
        with self._waiting.lock:
            self._waiting.closed = True
            rest = sorted(self._waiting.pull_ids)
            self._waiting.pull_ids.clear()
        for pull_id in rest:
            self.events.put(PullSettled(pull_id, error, (), 0, 0.0, ""))
