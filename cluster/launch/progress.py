"""What a person sees while a cluster starts, runs and stops."""

from __future__ import annotations

import time
from typing import TextIO


class Progress:
    """Writes a line for each step, with the seconds since the start."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._begun_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def step(self, what: str, result: str) -> None:
        """A step of the start that has succeeded."""
        self.line(f"{self.elapsed_s:6.1f}s  {what:<14} {result}".rstrip())

    def event(self, text: str) -> None:
        """Something that happened while the cluster runs."""
        self.line(f"{time.strftime('%H:%M:%S')}  {text}")

    def line(self, text: str) -> None:
        print(text, file=self._out, flush=True)
