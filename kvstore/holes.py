"""Free space of an arena: disjoint holes, neighbours always joined."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise


class Holes:
    """Free ranges of [0, num_bytes), taken by best fit.

    Best fit keeps raw and encoded pages, which differ by a third in size, from cutting up each other's room: an encoded
    page goes where one left, and the extents that raw pages leave while they are re-encoded grow together.
    """

    def __init__(self, num_bytes: int) -> None:
        self._size_at: dict[int, int] = {}  # start -> size
        self._start_before: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self.free_bytes = 0
        if num_bytes:
            self.give(0, num_bytes)

    @property
    def largest_bytes(self) -> int:
        """The most that `take` can give."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, num_bytes: int) -> int | None:
        """Start of a range of `num_bytes` >= 1 that is free no longer: from the smallest hole that has it, or None."""
        place = bisect_left(self._by_size, (num_bytes, 0))
        if place == len(self._by_size):
            return None
        size, start = self._by_size[place]
        self._remove(start, size)
        if size > num_bytes:
            self._add(start + num_bytes, size - num_bytes)
        return start

    def give(self, start: int, num_bytes: int) -> None:
        """Make a range free that is not."""
        end = start + num_bytes
        if (size := self._size_at.get(end)) is not None:
            self._remove(end, size)
            end += size
        if (before := self._start_before.get(start)) is not None:
            self._remove(before, start - before)
            start = before
        self._add(start, end - start)

    def copy(self) -> Holes:
        """To try out what giving would allow."""
        other = Holes(0)
        other._size_at = self._size_at.copy()
        other._start_before = self._start_before.copy()
        other._by_size = self._by_size.copy()
        other.free_bytes = self.free_bytes
        return other

    def ranges(self) -> list[tuple[int, int]]:
        """(start, size) of each hole, by start."""
        return sorted(self._size_at.items())

    def check(self) -> None:
        """Assert that the holes are disjoint, joined, and listed the same everywhere."""
        ranges = self.ranges()
        for (start, size), (following, _) in pairwise(ranges):
            assert start + size < following, "holes touch or overlap"
        assert self._by_size == sorted((size, start) for start, size in ranges)
        assert self._start_before == {start + size: start for start, size in ranges}
        assert self.free_bytes == sum(size for _, size in ranges)

    def _add(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_before[start + size] = start
        insort(self._by_size, (size, start))
        self.free_bytes += size

    def _remove(self, start: int, size: int) -> None:
        del self._size_at[start]
        del self._start_before[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.free_bytes -= size
