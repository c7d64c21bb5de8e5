"""Percentiles, spreads and ratios of what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Over repeats."""

    median: float
    low: float
    high: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between neighbours, as numpy does it. percent: 0 to 100. Raises ValueError without values."""
    if not values:
        raise ValueError("no percentile of nothing")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must lie in [0, 100], got {percent}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("no spread of nothing")
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of ours to theirs, taken repeat by repeat: both numbers of a pair come from the same minute.

    Raises ValueError for lists of different lengths.
    """
    return spread([our / their for our, their in zip(ours, theirs, strict=True)])
