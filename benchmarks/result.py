"""What a run of `serve_cpu` found, from the turns that were taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cancel import CancelTimes
from benchmarks.stats import Spread, percentile, ratios, spread
from benchmarks.turn import Turn

HEADRACE = "headrace"


Turns = Mapping[str, Mapping[int, Sequence[Turn]]]
"""By engine and number of streams; one turn per repeat. Headrace is the first."""


@dataclass(slots=True)
class Findings:
    """Collected as a run goes on."""

    turns: dict[str, dict[int, list[Turn]]] = field(default_factory=dict)
    """As `Turns`."""
    engines: dict[str, str] = field(default_factory=dict)
    """Who took part, and how."""
    absent: dict[str, str] = field(default_factory=dict)
    """Peers that could not take part, and why."""
    cancels: CancelTimes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLine:
    """One engine at one number of streams."""

    engine: str
    streams: int
    output_tokens_per_s: Spread
    """All streams together; over repeats."""
    ttft_p50_s: float
    """Over all requests of all repeats, like the next ones."""
    ttft_p99_s: float
    tpot_p50_s: float | None
    """None where answers have a single token."""
    num_requests: int
    cached_share: float
    """Of the prompts' tokens."""
    tokens_per_s_to_headrace: Spread | None
    """Headrace's tokens/s by this engine's, repeat by repeat: above 1 Headrace makes more. None for itself."""
    ttft_to_headrace: Spread | None
    """Headrace's median TTFT by this engine's, repeat by repeat: above 1 Headrace is slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelLine:
    """Cancel-to-free after one kind of close."""

    close: str
    p50_s: float
    p99_s: float
    num_trials: int


def engine_lines(turns: Turns, prompt_tokens: int) -> list[EngineLine]:
    """One per engine and number of streams, streams first."""
    return [
        _line(engine, streams, by_streams[streams], turns[HEADRACE][streams], prompt_tokens)
        for streams in next(iter(turns.values()))
        for engine, by_streams in turns.items()
    ]


def cancel_lines(times: CancelTimes) -> list[CancelLine]:
    """Kinds of close that were not tried are left out."""
    kinds = (("after the first token", times.after_first_token_s), ("at a random instant", times.at_random_s))
    return [
        CancelLine(close=kind, p50_s=percentile(seconds, 50), p99_s=percentile(seconds, 99), num_trials=len(seconds))
        for kind, seconds in kinds
        if seconds
    ]


def as_json(value: Any) -> Any:
    """Dataclasses as objects, numbers to six digits after the point."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: as_json(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value


def _line(engine: str, streams: int, turns: Sequence[Turn], ours: Sequence[Turn], prompt_tokens: int) -> EngineLine:
    requests = [request for turn in turns for request in turn.requests]
    ttfts = [request.ttft_s for request in requests]
    tpots = [request.tpot_s for request in requests if request.tpot_s is not None]
    is_peer = engine != HEADRACE
    return EngineLine(
        engine=engine,
        streams=streams,
        output_tokens_per_s=spread([turn.output_tokens_per_s for turn in turns]),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        tpot_p50_s=percentile(tpots, 50) if tpots else None,
        num_requests=len(requests),
        cached_share=sum(request.cached_tokens for request in requests) / (len(requests) * prompt_tokens),
        tokens_per_s_to_headrace=ratios(
            [turn.output_tokens_per_s for turn in ours], [turn.output_tokens_per_s for turn in turns]
        )
        if is_peer
        else None,
        ttft_to_headrace=ratios([_median_ttft(turn) for turn in ours], [_median_ttft(turn) for turn in turns])
        if is_peer
        else None,
    )


def _median_ttft(turn: Turn) -> float:
    return percentile([request.ttft_s for request in turn.requests], 50)
