"""What the next step computes: plain functions from sequences to work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.sequence import Sequence


class Work(NamedTuple):
    """Positions `[start, stop)` of one sequence, in one step."""

    sequence: Sequence
    start: int
    stop: int


def plan_step(runnable: Iterable[Sequence], chunk_tokens: int) -> list[Work]:
    """Every decoding sequence gets its token; prompts share `chunk_tokens` in order of arrival.

    A running stream is never stalled for longer than one chunk, whatever prompts come. At most one span per sequence:
    the positions behind a hole wait until the hole is filled.
    """
    decoding: list[Work] = []
    prompts: list[Sequence] = []
    for sequence in runnable:
        if sequence.is_decoding:
            decoding.append(Work(sequence, *sequence.pending[0]))
        elif sequence.pending:
            prompts.append(sequence)
    work = decoding
    left = chunk_tokens
    for sequence in sorted(prompts, key=lambda sequence: sequence.arrival):
        if left <= 0:
            break
        start, stop = sequence.pending[0]
        stop = min(stop, start + left)
        work.append(Work(sequence, start, stop))
        left -= stop - start
    return work
