"""What a worker tells about itself: how full it is, and how fast, as measured while it works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core import EngineCore, StepReport
from kvstore.pages import Owner, PinKind, Rate, WriteBack


class Rates:
    """Measured step by step."""

    def __init__(self) -> None:
        self.prefill = Rate()
        """Prompt positions, in steps that computed some."""
        self.decode = Rate()
        """Tokens of all streams together, in steps that computed no prompt."""
        self.tokens_computed = 0
        """Prompt positions since the start."""

    def measured(self, report: StepReport, seconds: float) -> None:
        """One step took `seconds`."""
        self.tokens_computed += report.prompt_tokens
        if report.prompt_tokens:
            self.prefill.measured(report.prompt_tokens, seconds)
        else:
            self.decode.measured(report.decode_tokens, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One instant of a worker's step loop. The names are those of the wire's `Load`."""

    pages_total: int
    pages_free: int
    """Free and evictable."""
    room_pages: int
    """What a new request could have: free pages less those promised to running ones."""
    pages_cached: int
    """In the prefix tree."""
    pages_quarantined: int
    """Nobody's, but an unsettled transfer may touch them."""
    running: int
    waiting: int
    queued_tokens: int
    """Prompt positions before a new request."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    tokens_computed: int
    tokens_generated: int
    pages_offered: int
    pages_evicted_unsaved: int
    preemptions: int


def worker_stats(
    engine: EngineCore,
    write_back: WriteBack,
    rates: Rates,
    *,
    running: int = 0,
    waiting: int = 0,
    queued_tokens: int = 0,
    tokens_generated: int = 0,
    held_for_the_lost: Iterable[int] = (),
) -> WorkerStats:
    """held_for_the_lost: pages leased out on streams that broke. Those that nobody else needs count as quarantined."""
    ledger = engine.cache.ledger
    held = sum(
        ledger.owner(page) is Owner.TREE and ledger.pins(page) == ledger.pins(page, PinKind.LEASE_OUT)
        for page in set(held_for_the_lost)
    )
    return WorkerStats(
        pages_total=ledger.num_pages,
        pages_free=ledger.pages_free,
        room_pages=engine.room_pages,
        pages_cached=engine.cache.num_cached,
        pages_quarantined=ledger.count(Owner.QUARANTINED) + held,
        running=running,
        waiting=waiting,
        queued_tokens=queued_tokens,
        prefill_tokens_per_s=rates.prefill.per_s,
        decode_tokens_per_s=rates.decode.per_s,
        tokens_computed=rates.tokens_computed,
        tokens_generated=tokens_generated,
        pages_offered=write_back.pages_offered,
        pages_evicted_unsaved=engine.cache.evicted_unsaved,
        preemptions=engine.preemptions,
    )
