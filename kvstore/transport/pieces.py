"""Cutting a pull into pieces: few extents, and no more bytes per post than the owner thread can afford."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.transport.base import PIECE_BYTES, Pull

Extents = npt.NDArray[np.int64]
"""[n, 3]: remote offset, local offset, bytes."""


def merged(pull: Pull) -> Extents:
    """The extents of `pull` in order, neighbours on both sides joined, empty ones left out."""
    extents = np.empty((len(pull.num_bytes), 3), dtype=np.int64)
    extents[:, 0], extents[:, 1], extents[:, 2] = pull.remote_offsets, pull.local_offsets, pull.num_bytes
    if not pull.num_bytes.all():
        extents = extents[pull.num_bytes > 0]
    if len(extents) < 2:
        return extents
    ends = extents[:-1, :2] + extents[:-1, 2:]
    joins = (ends == extents[1:, :2]).all(axis=1)
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    runs = extents[starts]
    runs[:, 2] = np.add.reduceat(extents[:, 2], starts)
    return runs


def pieces(pull: Pull, piece_bytes: int = PIECE_BYTES) -> list[Extents]:
    """The merged extents of `pull`, cut so that the bytes of each piece sum up to at most `piece_bytes`."""
    runs = merged(pull)
    total = int(runs[:, 2].sum())
    if total <= piece_bytes:
        return [runs] if total else []
    ends = np.cumsum(runs[:, 2])
    # Cut the line of all bytes at every multiple of piece_bytes, also inside a run.
    cuts = np.arange(piece_bytes, total, piece_bytes, dtype=np.int64)
    bounds = np.unique(np.concatenate(([0], ends, cuts)))
    begins, sizes = bounds[:-1], np.diff(bounds)
    owner = np.searchsorted(ends, begins, side="right")
    into = begins - (ends[owner] - runs[owner, 2])
    parts = np.stack([runs[owner, 0] + into, runs[owner, 1] + into, sizes], axis=1)
    return np.split(parts, np.searchsorted(begins, cuts))


def single_extents(pull: Pull, extent_bytes: int) -> list[Extents]:
    """The merged extents of `pull` as pieces of one extent each, of at most `extent_bytes`."""
    runs = merged(pull)
    counts = -(-runs[:, 2] // extent_bytes)
    owner = np.repeat(np.arange(len(runs)), counts)
    into = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * extent_bytes
    parts = np.stack([runs[owner, 0] + into, runs[owner, 1] + into, runs[owner, 2] - into], axis=1)
    np.minimum(parts[:, 2], extent_bytes, out=parts[:, 2])
    return list(parts[:, None])
