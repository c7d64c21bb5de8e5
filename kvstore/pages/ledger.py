"""Who owns each page of a pool, and who still needs it."""

from __future__ import annotations

import enum
import heapq
from collections import Counter


class Owner(enum.Enum):
    FREE = "free"
    RESERVED = "reserved"
    """Promised to a request; holds nothing."""
    FILLING = "filling"
    """Being computed or pulled."""
    REQUEST = "request"
    """Holds values that only its request knows."""
    TREE = "tree"
    """In the prefix tree, shared."""
    QUARANTINED = "quarantined"
    """Nobody's any more, but bytes may still land in it or be read from it."""


class PinKind(enum.Enum):
    REQUEST = "request"
    """A request's block table names this tree page."""
    LEASE_OUT = "lease_out"
    """Another process may be reading it."""
    ENCODING = "encoding"
    """On its way to a storage node."""
    LANDING = "landing"
    """A pull into it has not settled."""


class OutOfPages(Exception):
    """Not enough free pages. Attributes: `needed`, `room`."""

    def __init__(self, needed: int, room: int) -> None:
        super().__init__(f"{needed} pages needed, {room} free")
        self.needed = needed
        self.room = room


class InvalidTransition(Exception):
    """A bug: a page was asked to do what its state forbids. The message has page, state, pins and history."""


_HISTORY = 6


class Ledger:
    """Owner state and pins of every page of one pool. Written by the step loop alone.

        FREE --reserve--> RESERVED --begin_fill--> FILLING --complete--> REQUEST --publish--> TREE
         ^                   |                        |                     |                  |
         |                   +--------- retire -------+---------------------+                evict
         |                                |                                                    |
         +------- last unpin ---- QUARANTINED (pinned)                                         |
         +----------------------------- (no pin) ----------------------------------------------+

    Evictable = TREE without a pin. `pages_free` = FREE + evictable.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be >= 1, got {num_pages}")
        self.num_pages = num_pages
        self._owner = [Owner.FREE] * num_pages
        self._pins: list[Counter[PinKind]] = [Counter() for _ in range(num_pages)]
        self._counts: Counter[Owner] = Counter({Owner.FREE: num_pages})
        # A heap hands out the lowest ids first: neighbours in the pool are neighbours in a transfer, which merges them.
        self._free = list(range(num_pages))
        self._evictable = 0
        self._history: list[list[str]] = [[] for _ in range(num_pages)]

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._counts[Owner.FREE]

    @property
    def num_evictable(self) -> int:
        return self._evictable

    @property
    def pages_free(self) -> int:
        """Pages that could be given out: free and evictable ones."""
        return self.num_free + self._evictable

    def count(self, owner: Owner) -> int:
        return self._counts[owner]

    def owner(self, page: int) -> Owner:
        return self._owner[page]

    def pins(self, page: int, kind: PinKind | None = None) -> int:
        """Pins of one kind, or of all kinds."""
        return self._pins[page].total() if kind is None else self._pins[page][kind]

    def reserve(self, num_pages: int) -> list[int]:
        """Take free pages, lowest ids first. Raises OutOfPages; evicting is the caller's business."""
        if num_pages > self.num_free:
            raise OutOfPages(num_pages, self.num_free)
        pages = [heapq.heappop(self._free) for _ in range(num_pages)]
        for page in pages:
            self._move(page, "reserve", (Owner.FREE,), Owner.RESERVED)
        return pages

    def begin_fill(self, page: int) -> None:
        self._move(page, "begin_fill", (Owner.RESERVED,), Owner.FILLING)

    def complete(self, page: int) -> None:
        """Its values are final and nothing can land in it any more."""
        if self._pins[page][PinKind.LANDING]:
            raise self._invalid(page, "complete")
        self._move(page, "complete", (Owner.FILLING,), Owner.REQUEST)

    def publish(self, page: int) -> None:
        self._move(page, "publish", (Owner.REQUEST,), Owner.TREE)
        if not self.pins(page):
            self._evictable += 1

    def retire(self, page: int) -> None:
        """Its request lets go: free at once, or after the last pin."""
        pinned = self.pins(page) > 0
        self._move(page, "retire", (Owner.RESERVED, Owner.FILLING, Owner.REQUEST), _freed(pinned))
        if not pinned:
            heapq.heappush(self._free, page)

    def evict(self, page: int) -> None:
        """Leave the tree. Only without pins."""
        if self.pins(page):
            raise self._invalid(page, "evict")
        self._move(page, "evict", (Owner.TREE,), Owner.FREE)
        self._evictable -= 1
        heapq.heappush(self._free, page)

    def pin(self, page: int, kind: PinKind) -> None:
        if self._owner[page] in (Owner.FREE, Owner.QUARANTINED):
            raise self._invalid(page, f"pin {kind.value}")
        if self._owner[page] is Owner.TREE and not self.pins(page):
            self._evictable -= 1
        self._pins[page][kind] += 1

    def unpin(self, page: int, kind: PinKind) -> None:
        """Drop one pin. The last one frees a quarantined page."""
        if not self._pins[page][kind]:
            raise self._invalid(page, f"unpin {kind.value}")
        self._pins[page][kind] -= 1
        if self.pins(page):
            return
        if self._owner[page] is Owner.TREE:
            self._evictable += 1
        elif self._owner[page] is Owner.QUARANTINED:
            self._move(page, "unquarantine", (Owner.QUARANTINED,), Owner.FREE)
            heapq.heappush(self._free, page)

    def check(self) -> None:
        """Assert every invariant; O(pages)."""
        assert sorted(self._free) == [page for page in range(self.num_pages) if self._owner[page] is Owner.FREE]
        assert Counter(self._owner) == +self._counts
        evictable = 0
        for page in range(self.num_pages):
            pins = self._pins[page]
            assert all(count >= 0 for count in pins.values()), (page, pins)
            owner = self._owner[page]
            if owner is Owner.FREE:
                assert not pins.total(), self._describe(page)
            if owner is Owner.QUARANTINED:
                assert pins.total(), self._describe(page)
            if pins[PinKind.LANDING]:
                assert owner in (Owner.FILLING, Owner.QUARANTINED), self._describe(page)
            if pins[PinKind.REQUEST] or pins[PinKind.ENCODING]:
                assert owner is Owner.TREE, self._describe(page)
            evictable += owner is Owner.TREE and not pins.total()
        assert evictable == self._evictable

    def _move(self, page: int, verb: str, allowed: tuple[Owner, ...], to: Owner) -> None:
        owner = self._owner[page]
        if owner not in allowed:
            raise self._invalid(page, verb)
        self._owner[page] = to
        self._counts[owner] -= 1
        self._counts[to] += 1
        history = self._history[page]
        history.append(verb)
        del history[:-_HISTORY]

    def _invalid(self, page: int, verb: str) -> InvalidTransition:
        return InvalidTransition(f"{verb}: {self._describe(page)}")

    def _describe(self, page: int) -> str:
        pins = {kind.value: count for kind, count in self._pins[page].items() if count}
        return f"page {page} is {self._owner[page].value}, pins {pins}, after {self._history[page]}"


def _freed(pinned: bool) -> Owner:
    return Owner.QUARANTINED if pinned else Owner.FREE
