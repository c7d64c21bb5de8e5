"""Which pages go first: a small rule that a `PageTree` is made with. Arithmetic over events, no clock of its own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod


class Eviction(ABC):
    """Pages wait in queues, each in the order of last use. Of the queues' heads, the page worth least goes first.

    Time is counted in uses of pages of the same tree. Two demands keep the tree's order exact and cheap: `worth` falls
    with `idle_uses`, so that the head of a queue is worth less than all behind it; and another use of a page never
    makes it worth less, nor moves it to a queue before its own, so that the tree may notice a use when it looks at the
    page next.
    """

    num_queues: int

    @abstractmethod
    def queue(self, num_uses: int) -> int:
        """Where a page waits that was used so often: 0 <= queue < num_queues."""

    @abstractmethod
    def worth(self, queue: int, idle_uses: int, num_pages: int) -> float:
        """Of a page of `queue` since whose last use `idle_uses` >= 0 pages were used, in a tree of `num_pages`."""

    @abstractmethod
    def arrived(self, key: bytes) -> int:
        """Uses of a page that enters the tree, this one included."""

    @abstractmethod
    def left(self, key: bytes, num_uses: int, num_pages: int) -> None:
        """A page has left a tree, in which `num_pages` are now."""


class LeafLru(Eviction):
    """The least recently used leaf goes first."""

    num_queues = 1

    def queue(self, num_uses: int) -> int:
        return 0

    def worth(self, queue: int, idle_uses: int, num_pages: int) -> float:
        return -idle_uses

    def arrived(self, key: bytes) -> int:
        return 1

    def left(self, key: bytes, num_uses: int, num_pages: int) -> None:
        pass


class LeafFrequency(Eviction):
    """The leaf with the fewest uses per idle time goes first, uses before an earlier eviction included.

    Most pages are used once, and those that were used again will be again: in traces of conversations and of questions
    about documents, the hazard of the next use grows about linearly with the uses so far and falls with the idle time.
    """

    num_queues = 16
    _POWER = 0.75
    _YOUNG = 0.3
    """Idle time, in uses of as many pages as the tree has, within which age counts little: turns of a conversation are
    some time apart. On the conversation trace at 5 % capacity, 0.1 to 1 gave the same within half a point."""

    def __init__(self) -> None:
        self._weights = [math.pow(uses, self._POWER) for uses in range(1, self.num_queues + 1)]
        self._gone = _RecentlyGone()

    def queue(self, num_uses: int) -> int:
        return min(num_uses, self.num_queues) - 1

    def worth(self, queue: int, idle_uses: int, num_pages: int) -> float:
        return self._weights[queue] / (idle_uses + self._YOUNG * num_pages + 1)

    def arrived(self, key: bytes) -> int:
        return 1 + self._gone.num_uses(key)

    def left(self, key: bytes, num_uses: int, num_pages: int) -> None:
        self._gone.add(key, num_uses, num_pages)


class _RecentlyGone:
    """How often pages were used that are here no longer: a sketch in two generations, 64 bytes per page of the tree.

    Keys are uniformly distributed, so their bytes are the places. A page counts as used as often as both of its places
    say; a stranger does so by mistake in one case of twenty.
    """

    _PAGES = 4
    """Pages that go in one generation, by pages of the tree. Remembered is what went in this one and in the last."""
    _PLACES = 8
    """Bytes per page that goes in a generation."""
    _MIN_PAGES = 64

    def __init__(self) -> None:
        self._old = self._new = bytearray(1)
        self._left_in_generation = 0

    def num_uses(self, key: bytes) -> int:
        return max(min(uses[place] for place in _places(key, uses)) for uses in (self._old, self._new))

    def add(self, key: bytes, num_uses: int, num_pages: int) -> None:
        if not self._left_in_generation:
            self._left_in_generation = self._PAGES * max(num_pages, self._MIN_PAGES)
            self._old, self._new = self._new, bytearray(self._PLACES * self._left_in_generation)
        self._left_in_generation -= 1
        for place in _places(key, self._new):
            self._new[place] = max(self._new[place], min(num_uses, 255))


def _places(key: bytes, uses: bytearray) -> tuple[int, int]:
    return int.from_bytes(key[:8], "little") % len(uses), int.from_bytes(key[8:16], "little") % len(uses)
