"""What one step computes, and its rows as the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.config import ModelConfig
from engine.kernels.attention import QUERY_ROWS
from engine.kernels.decoder import Batch, Pool
from engine.rotation import Rotation


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive positions of one request in one step."""

    token_ids: Sequence[int]
    """At least one."""
    start: int
    """Absolute position of the first token."""
    block_table: Sequence[int]
    """Page ids that cover start + len(token_ids) positions. What lies before `start` must have been computed."""
    wants_logits: bool
    """Of the last position."""


def make_batch(segments: Sequence[Segment], pool: Pool, config: ModelConfig, rotation: Rotation) -> Batch:
    """One row per position, segment after segment. At least one segment.

    Raises ValueError for positions, pages or tokens that do not exist: the kernels check nothing.
    """
    num_pages = len(pool.elements) // pool.page_stride
    token_ids: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    units: list[tuple[int, int, int, int]] = []
    tables: list[np.ndarray] = []
    num_tables = 0
    logit_rows: list[int] = []
    for segment in segments:
        count = len(segment.token_ids)
        end = segment.start + count
        if count < 1 or segment.start < 0 or end > config.context_tokens:
            raise ValueError(f"{count} positions from {segment.start} on; the context has {config.context_tokens}")
        num_needed = -(-end // pool.page_size)
        if num_needed > len(segment.block_table):
            raise ValueError(f"a block table of {len(segment.block_table)} pages for {end} positions")
        pages = np.asarray(segment.block_table[:num_needed], np.int64)
        if pages.min() < 0 or pages.max() >= num_pages:
            raise ValueError(f"the block table {segment.block_table} leaves the pool of {num_pages} pages")
        for at in range(0, count, QUERY_ROWS):
            num_rows = min(QUERY_ROWS, count - at)
            units.append((len(token_ids) + at, num_rows, segment.start + at, num_tables))
        where = np.arange(segment.start, end)
        positions.append(where)
        slots.append(pages[where // pool.page_size] * pool.page_stride + where % pool.page_size * config.head_dim)
        tables.append(pages)
        num_tables += num_needed
        token_ids.extend(segment.token_ids)
        if segment.wants_logits:
            logit_rows.append(len(token_ids) - 1)
    ids = np.asarray(token_ids, np.int64)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"token ids must lie in [0, {config.vocab_size})")
    all_positions = np.concatenate(positions)
    rotation.reach(int(all_positions.max()) + 1)
    return Batch(
        token_ids=ids,
        positions=all_positions,
        slots=np.concatenate(slots),
        units=np.asarray(units, np.int64).reshape(-1),
        tables=np.concatenate(tables),
        logit_rows=np.asarray(logit_rows, np.int64),
        cosines=rotation.cosines,
        sines=rotation.sines,
    )
