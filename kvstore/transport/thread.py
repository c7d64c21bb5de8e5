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
from collections import deque
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

_SPIN_S = (
    0.2e-3  # so long after something happened nothing is slept: a sleep takes 0.1 ms however short it is asked to be
)
_PAUSE_SHARE = 1 / 16  # of the time since something last happened: the most that sleeping then adds to a pull's latency
_PAUSE_MAX_S = 5e-3
_START_S = 60.0  # importing NIXL and registering a large region, on a loaded machine
_DIGEST_BYTES = 4 << 20  # per round: 2 ms
_CLOSE_S = 2.0  # what close() waits for transfers to settle before it ends them by force


@dataclass(frozen=True, slots=True)
class DigestsReady:
    """The answer to `digests`."""

    tag: object
    digests: npt.NDArray[np.uint64]
    """[n, heads]"""


@dataclass(frozen=True, slots=True)
class TransportFailed:
    """The last event: the thread has ended by itself and this process can pull nothing any more."""

    reason: str


TransportEvent = PullExpired | PullSettled | DigestsReady | TransportFailed


class EventSink(Protocol):
    """Where events go: a `queue.SimpleQueue`, or the inbox of a step loop. `put` must not block."""

    def put(self, event: TransportEvent, /) -> None: ...


@dataclass(slots=True, eq=False)
class _Active:
    """A pull that was begun and has not been reported."""

    transfer: Transfer
    submitted_s: float
    verdict: str | None = None
    """EXPIRED, CANCELLED or CLOSED once one of them happened; the first one stays."""
    check: _DigestJob | None = None
    """After every byte has landed in time: the digests of what landed."""
    seconds: float = 0.0
    """From `submit` to the last byte, once settled."""


class _DigestJob:
    """Digests of local extents, computed a little at a time so that other pulls are not kept waiting."""

    def __init__(
        self, offsets: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64], heads: int, tag: object = None
    ) -> None:
        self.digests = np.zeros((len(offsets), heads), dtype=np.uint64)
        self.tag = tag
        # A head count that does not divide an extent comes from the wire: no digest of that extent can be right.
        self._divides = num_bytes % heads == 0
        self._todo = list(zip(offsets.tolist(), num_bytes.tolist(), strict=True))
        self._next = 0

    def advance(self, region: npt.NDArray[np.uint8]) -> bool:
        """Computes the next few; True once all are there."""
        budget_bytes = _DIGEST_BYTES
        heads = self.digests.shape[1]
        while self._next < len(self._todo) and budget_bytes > 0:
            offset, size = self._todo[self._next]
            if self._divides[self._next]:
                self.digests[self._next] = page_digests(region[None, offset : offset + size], heads)[0]
            budget_bytes -= size
            self._next += 1
        return self._next == len(self._todo)

    def differing(self, expected: npt.NDArray[np.uint64]) -> tuple[int, ...]:
        """The extents whose digests are not those in `expected`, uint64 [n, heads]."""
        return tuple(np.flatnonzero(~self._divides | (self.digests != expected).any(axis=1)).tolist())


@dataclass(slots=True)
class _Waiting:
    """What the threads share: the pulls without their PullSettled, and whether more are taken."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pull_ids: set[int] = field(default_factory=set)
    refusal: str | None = None
    """Why no more are taken, once that is so."""


class TransportThread:
    """Owns a PageTransport on one thread.

    Every submitted pull gets exactly one `PullSettled` in `events`, whatever happens to the peer, the pull or this
    object, and at most one `PullExpired` before it. A thread that ends without `close` says so by `TransportFailed`,
    once the pulls of its time have settled.
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
        self._digest_jobs: deque[_DigestJob] = deque()
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
            refusal = self._waiting.refusal
            if refusal is None:
                self._waiting.pull_ids.add(pull.pull_id)
                submitted_s = time.monotonic()
                self._commands.put(lambda: self._begin(pull, submitted_s))
        if refusal is not None:
            self.events.put(PullSettled(pull.pull_id, refusal, (), 0, 0.0, ""))

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
        self._commands.put(lambda: self._digest_jobs.append(_DigestJob(offsets, num_bytes, heads, tag)))

    def close(self) -> None:
        """Settles every pull, by force after `close_s`, closes the transport and ends the thread. Idempotent."""
        with self._waiting.lock:
            self._waiting.refusal = self._waiting.refusal or CLOSED
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
        ending, failed = CLOSED, False
        try:
            self._card.set_result(self._transport.card())
            self._loop()
        except Exception as error:
            # The edge of the thread: whoever waits for a pull must hear of it, and this worker can pull no more.
            logger.exception("the transport thread failed")
            ending, failed = f"the transport thread failed: {error}", True
        finally:
            try:
                self._transport.close()
            except Exception:
                logger.exception("the transport did not close")
            for active in list(self._active.values()):
                self._report(active, active.verdict or ending)
            self._refuse_the_rest(ending)
            if failed:
                self.events.put(TransportFailed(ending))

    def _loop(self) -> None:
        moved_s = time.monotonic()
        force_s = float("inf")
        while True:
            now_s = time.monotonic()
            if self._closing:
                force_s = min(force_s, now_s + self._close_s)
                if not self._active or now_s >= force_s:
                    return
            busy = self._active or self._digest_jobs or self._closing
            if self._obey(_pause_s(now_s - moved_s) if busy else None) | self._advance():
                moved_s = time.monotonic()

    def _obey(self, pause_s: float | None) -> bool:
        """Runs the commands that are there, waiting up to `pause_s` for the first (None: as long as it takes).

        Returns whether there was one.
        """
        obeyed = False
        try:
            if pause_s == 0:
                time.sleep(0)  # lets the other threads have the interpreter, which the queue does not when it is empty
            command = self._commands.get(timeout=pause_s)
            while True:
                command()
                obeyed = True
                command = self._commands.get_nowait()
        except queue.Empty:
            return obeyed

    def _advance(self) -> bool:
        """One round: at most one piece, or a few digests, of each pull, so that none keeps the others waiting."""
        moved = False
        for pull_id, active in list(self._active.items()):
            transfer = active.transfer
            if not transfer.settled:
                if boot_time_s() > transfer.pull.deadline_s:
                    self._stop(pull_id, EXPIRED)
                moved |= transfer.advance()
            if transfer.settled:
                self._check(active)
                moved = True
        if self._digest_jobs:
            job = self._digest_jobs[0]
            if job.advance(self._transport.region):
                self._digest_jobs.popleft()
                self.events.put(DigestsReady(job.tag, job.digests))
            moved = True
        return moved

    def _begin(self, pull: Pull, submitted_s: float) -> None:
        expired = boot_time_s() > pull.deadline_s
        transfer = SettledTransfer(pull) if expired else self._transport.begin(pull)
        self._active[pull.pull_id] = _Active(transfer, submitted_s)

    def _stop(self, pull_id: int, verdict: str) -> None:
        active = self._active.get(pull_id)
        if active is None or active.verdict is not None or active.transfer.settled:
            return
        active.verdict = verdict
        active.transfer.stop()
        if verdict == EXPIRED:
            self.events.put(PullExpired(pull_id))

    def _check(self, active: _Active) -> None:
        """Reports a settled pull, once what landed has been digested where that was asked."""
        transfer, pull = active.transfer, active.transfer.pull
        if active.check is None:
            active.seconds = time.monotonic() - active.submitted_s
            late = boot_time_s() > pull.deadline_s
            error = active.verdict or transfer.error or (EXPIRED if late else None)
            if error is not None or pull.expected is None:
                self._report(active, error)
                return
            active.check = _DigestJob(pull.local_offsets, pull.num_bytes, pull.expected.shape[1])
        if active.check.advance(self._transport.region):
            assert pull.expected is not None, "digests are computed for comparing"
            self._report(active, None, active.check.differing(pull.expected))

    def _report(self, active: _Active, error: str | None, mismatched: tuple[int, ...] = ()) -> None:
        pull_id, transfer = active.transfer.pull.pull_id, active.transfer
        del self._active[pull_id]
        with self._waiting.lock:
            self._waiting.pull_ids.discard(pull_id)
        self.events.put(PullSettled(pull_id, error, mismatched, transfer.landed_bytes, active.seconds, transfer.path))

    def _begin_closing(self) -> None:
        self._closing = True
        for pull_id in self._active:
            self._stop(pull_id, CLOSED)

    def _refuse_the_rest(self, error: str) -> None:
        """Settles the pulls that were submitted and never begun, and from now on every new one at once."""
        with self._waiting.lock:
            self._waiting.refusal = error
            rest = sorted(self._waiting.pull_ids)
            self._waiting.pull_ids.clear()
        for pull_id in rest:
            self.events.put(PullSettled(pull_id, error, (), 0, 0.0, ""))


def _pause_s(quiet_s: float) -> float:
    """How long to sleep while something is in flight of which nothing was heard for `quiet_s`."""
    return 0.0 if quiet_s < _SPIN_S else min(quiet_s * _PAUSE_SHARE, _PAUSE_MAX_S)
