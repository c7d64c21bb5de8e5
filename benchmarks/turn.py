"""What one engine did in its turn. Needs only the standard library: peers import it in interpreters of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTiming:
    """Instants of one request, of one monotonic clock."""

    sent_s: float
    """The client begins to send; without a server, the batch is handed over."""
    first_token_s: float
    """The first chunk that bears text has come; without a server, the token is known."""
    ended_s: float
    """The last chunk that bears text has come."""
    output_tokens: int
    cached_tokens: int = 0
    """Of the prompt, found in a prefix cache."""

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single one."""
        if self.output_tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """All requests of one engine at one number of streams in one repeat."""

    requests: tuple[RequestTiming, ...]
    driver_cores: float = 0.0
    """CPU seconds per second that the load generator took from the cores that it shares with the engine."""

    @property
    def seconds(self) -> float:
        """From the first request sent to the last one ended."""
        return max(each.ended_s for each in self.requests) - min(each.sent_s for each in self.requests)

    @property
    def output_tokens_per_s(self) -> float:
        """All streams together, prefill included."""
        return sum(each.output_tokens for each in self.requests) / self.seconds


def batch_timings(sent_s: float, token_instants_s: Sequence[Sequence[float]]) -> list[RequestTiming]:
    """Of a batch that was handed over at once. token_instants_s: per request, when each of its tokens was known."""
    return [
        RequestTiming(sent_s=sent_s, first_token_s=instants[0], ended_s=instants[-1], output_tokens=len(instants))
        for instants in token_instants_s
    ]
