"""Peers to pull from, and a reader that checks that every pull is settled exactly once."""

from __future__ import annotations

import contextlib
import itertools
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.pages.digest import page_digests
from kvstore.transport import (
    Card,
    PageTransport,
    Pull,
    PullExpired,
    PullSettled,
    TransportEvent,
    TransportFailed,
    TransportThread,
    boot_time_s,
    create_transport,
)
from kvstore.transport.inprocess import Fabric
from tests.kvstore.transport.peer_process import card_from_hex, content

REGION_BYTES = 33 << 20  # three pieces
PAGE_BYTES = 96 << 10
WAIT_S = 30.0  # far more than anything takes; only a test that fails waits as long

_T = TypeVar("_T")
_ROOT = Path(__file__).parents[3]
_seeds = itertools.count(1)


class ProcessPeer:
    """Another process that serves a region over NIXL. UCX_* of this process' environment reach it."""

    def __init__(self) -> None:
        seed = next(_seeds)
        self.content = content(seed, REGION_BYTES)
        self._process = _spawn(str(seed), str(REGION_BYTES))
        self.card = card_from_hex(_line(self._process))

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def serves(self) -> bool:
        """Whether the process lives, which it has to show by an answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("ping\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return _line(self._process) == "pong"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)

    def close(self) -> None:
        """Lets the process end by itself, which it must do in good order unless it was killed."""
        with self._process:
            self.wake()
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(WAIT_S)
            finally:
                self._process.kill()
        assert self._process.returncode in (0, -signal.SIGKILL)


class InProcessPeer:
    """A region in the same fabric. Killing it takes it out of the fabric."""

    def __init__(self, fabric: Fabric) -> None:
        seed = next(_seeds)
        self.content = content(seed, REGION_BYTES)
        self._transport = create_transport(("inprocess",), self.content, f"peer-{seed}", fabric=fabric)
        self.card = self._transport.card()

    def kill(self) -> None:
        self._transport.close()

    def close(self) -> None:
        self._transport.close()


class PullingProcess:
    """Another process that pulls from `source` without end."""

    def __init__(self, source: Card) -> None:
        self._process = _spawn("0", str(REGION_BYTES), source.to_proto().SerializeToString().hex())
        assert _line(self._process) == "pulling"

    def kill(self) -> None:
        with self._process:
            self._process.kill()


class Reader:
    """A transport thread over a region of ones, and the book of what it was asked and what it answered."""

    def __init__(self, make_transport: Callable[[npt.NDArray[np.uint8]], PageTransport], close_s: float = 2.0) -> None:
        self.region = np.ones(REGION_BYTES, dtype=np.uint8)
        self.events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.thread = TransportThread(lambda: make_transport(self.region), events=self.events, close_s=close_s)
        self.card = self.thread.start()
        self.expired: set[int] = set()
        self.failure: str | None = None
        """Of the thread, which says so last."""
        self._settled: dict[int, PullSettled] = {}
        self._submitted = 0

    def submit(
        self,
        card: Card,
        remote: Sequence[int],
        local: Sequence[int],
        sizes: Sequence[int],
        *,
        deadline_in_s: float = WAIT_S,
        expected: npt.NDArray[np.uint64] | None = None,
    ) -> int:
        """Submits a pull and returns its id."""
        self._submitted += 1
        self.thread.submit(
            Pull(
                pull_id=self._submitted,
                card=card,
                remote_offsets=np.array(remote, dtype=np.int64),
                local_offsets=np.array(local, dtype=np.int64),
                num_bytes=np.array(sizes, dtype=np.int64),
                deadline_s=boot_time_s() + deadline_in_s,
                expected=expected,
            )
        )
        return self._submitted

    def settled(self, pull_id: int) -> PullSettled:
        """Waits for the last word on that pull."""
        return self._until(lambda: self._settled.get(pull_id))

    def wait_failed(self) -> str:
        return self._until(lambda: self.failure)

    def has_settled(self, pull_id: int) -> bool:
        self._drain()
        return pull_id in self._settled

    def wait_expired(self, pull_id: int) -> None:
        self._until(lambda: pull_id in self.expired)

    def pull(self, card: Card, remote: Sequence[int], local: Sequence[int], sizes: Sequence[int]) -> PullSettled:
        return self.settled(self.submit(card, remote, local, sizes))

    def close(self) -> None:
        """Closes the thread and checks the book: one PullSettled for each pull."""
        self.thread.close()
        self._drain()
        assert sorted(self._settled) == list(range(1, self._submitted + 1))

    def _until(self, value: Callable[[], _T | None]) -> _T:
        deadline_s = time.monotonic() + WAIT_S
        while not (found := value()):
            self._note(self.events.get(timeout=deadline_s - time.monotonic()))
        return found

    def _drain(self) -> None:
        try:
            while True:
                self._note(self.events.get_nowait())
        except queue.Empty:
            pass

    def _note(self, event: TransportEvent) -> None:
        match event:
            case PullExpired(pull_id):
                assert pull_id not in self.expired, "expired twice"
                assert pull_id not in self._settled, "expired after it had settled"
                self.expired.add(pull_id)
            case PullSettled(pull_id):
                assert pull_id not in self._settled, "settled twice"
                self._settled[pull_id] = event
            case TransportFailed(reason):
                assert self.failure is None, "failed twice"
                self.failure = reason
            case _:
                raise AssertionError(f"unexpected {event}")


def digests(data: npt.NDArray[np.uint8], offsets: Sequence[int], size: int, heads: int) -> npt.NDArray[np.uint64]:
    """uint64 [n, heads] of the extents of `size` bytes at `offsets`."""
    return page_digests(np.stack([data[offset : offset + size] for offset in offsets]), heads)


def pull_until_error(reader: Reader, card: Card) -> str:
    """Pulls the whole region again and again until it fails; the error."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        if (error := reader.pull(card, [0], [0], [REGION_BYTES]).error) is not None:
            return error
    raise AssertionError("pulls went on succeeding")


def _spawn(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kvstore.transport.peer_process", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
