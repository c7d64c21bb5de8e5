"""Which pages go first: a small rule that a `PageTree` is made with. Arithmetic over events, no clock of its own."""

from __future__ import annotations

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
        """A page has left a tree in which `num_pages` are."""


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
