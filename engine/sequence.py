"""One request as the engine sees it: tokens, pages, and the positions that are still to be computed."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.sampling import SamplingParams


class Span(NamedTuple):
    """Token positions `[start, stop)`."""

    start: int
    stop: int


class FinishReason(enum.Enum):
    STOP = "stop"
    """The model ended the text. The token that said so is not part of the output."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context."""


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """Made by `EngineCore.open`, ended by `EngineCore.close`.

    The next token is sampled whenever the last position has been computed. So a prompt in chunks, a prompt with holes
    and one decoded token are all the same thing: spans in `pending`.
    """

    request_id: str
    token_ids: list[int]
    """Prompt and output."""
    num_prompt_tokens: int
    """Tokens before the output, so that output of an earlier attempt still counts as output."""
    params: SamplingParams
    namespace: bytes
    """Tenant's own; keys start from it."""
    arrival: int
    """Order of admission; the youngest is preempted first."""
    block_table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Of the full pages, as far as they were needed."""
    missing: set[int] = field(default_factory=set)
    """Page indices of the prompt whose values are not here yet."""
    pending: list[Span] = field(default_factory=list)
    """Positions to compute, ascending. Empty while pages are awaited from elsewhere."""
    growth_pages: int = 0
    """Pages promised for output and not yet taken."""
    cached_tokens: int = 0
    """Prompt tokens found in the pool at admission; a multiple of the page size."""
    computed_tokens: int = 0
    """Positions computed here."""
    closed: bool = False

    @property
    def num_pending(self) -> int:
        return sum(span.stop - span.start for span in self.pending)

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is still to be computed."""
        return self.num_pending == 1 and self.pending[0].stop == len(self.token_ids) and self.num_output_tokens > 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def merged_spans(page_indices: Iterable[int], page_size: int, num_tokens: int) -> list[Span]:
    """The positions below `num_tokens` that these pages hold, neighbours merged, ascending."""
    spans: list[Span] = []
    for index in sorted(page_indices):
        start, stop = index * page_size, min((index + 1) * page_size, num_tokens)
        if spans and spans[-1].stop == start:
            spans[-1] = Span(spans[-1].start, stop)
        else:
            spans.append(Span(start, stop))
    return spans
