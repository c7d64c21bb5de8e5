"""What takes a turn: Headrace or a peer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from benchmarks.load import Target, closed_loop, open_client
from benchmarks.prompts import Prompt
from benchmarks.turn import Turn


class Engine(ABC):
    """One that is ready and idle. Only one engine works at a time."""

    name: str
    kind: str
    """How it is driven, for the reader of the numbers."""
    version: str

    @abstractmethod
    def measure(self, rounds: Sequence[Sequence[Prompt]], output_tokens: int) -> Turn:
        """Answer every prompt with `output_tokens` tokens, greedily; a round's prompts are in flight together.

        Raises BenchmarkError.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, also in the middle of a turn. Idempotent."""


class HttpEngine(Engine):
    """A server of the OpenAI API, under a closed loop."""

    kind = "server over HTTP"

    def __init__(self, name: str, version: str, target: Target, runner: asyncio.Runner) -> None:
        """runner: owns the event loop; closing it is the caller's."""
        self.name = name
        self.version = version
        self.target = target
        self._runner = runner
        self._client = open_client(target)

    def measure(self, rounds: Sequence[Sequence[Prompt]], output_tokens: int) -> Turn:
        return self._runner.run(closed_loop(self._client, self.target.model, rounds, output_tokens))

    def close(self) -> None:
        self._runner.run(self._client.close())
