"""Results for a person: tables as plain text or as markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.result import CancelLine, EngineLine
from benchmarks.stats import Spread

_ENGINE_HEADS = (
    "streams",
    "engine",
    "output tokens/s",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "TPOT p50 ms",
    "requests",
    "Headrace / it: tokens/s",
    "Headrace / it: TTFT",
)
_CANCEL_HEADS = ("cancel to free", "p50 ms", "p99 ms", "trials")


def engine_table(lines: Sequence[EngineLine], *, markdown: bool) -> str:
    """One row per engine and number of streams."""
    rows = [
        (
            str(line.streams),
            line.engine,
            _spread(line.output_tokens_per_s, 1),
            _ms(line.ttft_p50_s),
            _ms(line.ttft_p99_s),
            _ms(line.tpot_p50_s),
            str(line.num_requests),
            _spread(line.tokens_per_s_to_headrace, 2),
            _spread(line.ttft_to_headrace, 2),
        )
        for line in lines
    ]
    return table(_ENGINE_HEADS, rows, markdown=markdown)


def cancel_table(lines: Sequence[CancelLine], *, markdown: bool) -> str:
    """One row per kind of close."""
    rows = [(line.close, _ms(line.p50_s), _ms(line.p99_s), str(line.num_trials)) for line in lines]
    return table(_CANCEL_HEADS, rows, markdown=markdown)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    """Aligned columns, or markdown's pipes."""
    if markdown:
        lines = [heads, ["---"] * len(heads), *rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [heads, *rows]
    )


def _spread(value: Spread | None, digits: int) -> str:
    """median [min..max]"""
    if value is None:
        return "-"
    return f"{value.median:.{digits}f} [{value.low:.{digits}f}..{value.high:.{digits}f}]"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
