"""A peer in a process of its own, from both ends of its pipes.

One JSON object per line. The child says `{"version": ...}` once it is ready, or `{"unavailable": why}`. From then on
each `{"rounds": [[[token ids] per prompt] per round], "output_tokens": n}` is answered with `{"requests": [...]}`, the
fields of RequestTiming per request. Between them the child waits and uses no core. It ends when its input does.

Needs only the standard library, since the child may run in another interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.errors import BenchmarkError, Unavailable
from benchmarks.turn import RequestTiming

START_DEADLINE_S = 300.0
ROOT = Path(__file__).parents[2]


class Worker(Protocol):
    """What a child runs. `rounds`: per round, the token ids of each prompt; a round's prompts are one batch."""

    version: str

    def measure(self, rounds: Sequence[Sequence[Sequence[int]]], output_tokens: int) -> list[RequestTiming]: ...


class Child:
    """The parent's end."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """log: gets what the child's libraries print."""
        self._name = name
        self._log = log
        self._received = b""
        with log.open("wb") as errors:
            # In a session of its own: a Ctrl-C on our terminal is for us to act upon, in order.
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def ready(self) -> str:
        """Wait for the child, and return its version. Raises Unavailable with its own words, or BenchmarkError."""
        said = self._read(START_DEADLINE_S)
        if "unavailable" in said:
            raise Unavailable(said["unavailable"])
        return str(said["version"])

    def measure(
        self, rounds: Sequence[Sequence[Sequence[int]]], output_tokens: int, deadline_s: float
    ) -> list[RequestTiming]:
        """Raises BenchmarkError if the child fails, ends, or takes longer than `deadline_s` seconds."""
        assert self._process.stdin is not None
        line = json.dumps({"rounds": rounds, "output_tokens": output_tokens}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchmarkError(self._ended()) from None
        said = self._read(deadline_s)
        return [RequestTiming(**fields) for fields in said["requests"]]

    def close(self) -> None:
        """End the process. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:  # in the middle of a batch
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        until_s = time.monotonic() + deadline_s
        while b"\n" not in self._received:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                raise BenchmarkError(f"{self._name}: no answer within {deadline_s:.0f} s; its log: {self._log_tail()}")
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            if not received:
                raise BenchmarkError(self._ended())
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        said = json.loads(line)
        assert isinstance(said, dict)
        return said

    def _ended(self) -> str:
        return f"{self._name}: its process ended with {self._process.wait()}; its log: {self._log_tail()}"

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:].strip()


def run_child(make_worker: Callable[[], Worker]) -> None:
    """The child's end. make_worker: imports and loads; may raise Unavailable."""
    with _to_parent() as say:
        try:
            worker = make_worker()
        except Unavailable as error:
            say({"unavailable": str(error)})
            return
        say({"version": worker.version})
        for line in sys.stdin:
            request = json.loads(line)
            timings = worker.measure(request["rounds"], request["output_tokens"])
            say({"requests": [dataclasses.asdict(timing) for timing in timings]})


@contextlib.contextmanager
def _to_parent() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that sends one object to the parent. Whatever libraries print goes to the log instead."""
    with os.fdopen(os.dup(1), "w", buffering=1) as pipe:
        os.dup2(2, 1)
        yield lambda message: print(json.dumps(message), file=pipe)
