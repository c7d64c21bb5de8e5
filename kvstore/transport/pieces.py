"""Cutting a pull into pieces: few extents, and no more bytes per post than the owner thread can afford."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.transport.base import PIECE_BYTES, Pull

Extents = npt.NDArray[np.int64]
"""[n, 3]: remote offset, local offset, bytes."""


def merged(pull: Pull) -> Extents:
    """The extents of `pull` in order, neighbours on both sides joined, empty ones left out."""
    extents = np.stack([pull.remote_offsets, pull.local_offsets, pull.num_bytes], axis=1)
    extents = extents[extents[:, 2] > 0]
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
    ends = np.cumsum(runs[:, 2])
    total = int(ends[-1]) if len(ends) else 0
    if total <= piece_bytes:
        return [runs] if len(runs) else []
    # Cut the line of all bytes at every multiple of piece_bytes, also inside a run.
    cuts = np.arange(piece_bytes, total, piece_bytes, dtype=np.int64)
    bounds = np.unique(np.concatenate(([0], ends, cuts)))
    begins, sizes = bounds[:-1], np.diff(bounds)
    owner = np.searchsorted(ends, begins, side="right")
    into = begins - (ends[owner] - runs[owner, 2])
    parts = np.stack([runs[owner, 0] + into, runs[owner, 1] + into, sizes], axis=1)
    return np.split(parts, np.searchsorted(begins, cuts))
