"""The one radix tree of this project: pages by key, linked to their parents.

Keys commit to the whole prefix (`kvstore/pages/keys.py`), so an edge is one page and a look-up needs no token ids.
Workers keep page ids in it, storage nodes keep headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from kvstore.pages.eviction import Eviction, LeafLru

V = TypeVar("V")

_SLACK = 64
"""Entries for pages that have gone which even a small tree may have in its queues."""


class _Node(Generic[V]):
    __slots__ = ("key", "last_used", "num_children", "num_uses", "parent", "queued", "value")

    def __init__(self, key: bytes, parent: bytes | None, value: V) -> None:
        self.key = key
        self.parent = parent
        self.value = value
        self.last_used = 0
        self.num_uses = 0
        self.num_children = 0
        self.queued = False
        """Whether it has an entry in a queue, or is among what the walk has yielded: one place at a time."""


class PageTree(Generic[V]):
    """Pages by key, with holes allowed: a page whose parent is absent stays valid and findable.

    Use has an order and no clock: `match`, `touch` and `insert` make a page the most recently used one. Which page goes
    first is up to `eviction`, among leaves: a parent outlives its children.

    Leaves wait in heaps, one per queue of `eviction`. An entry may be behind: the use of a page changes no heap, so a
    match costs the same in a tree of any size. Entries are put right when they come to the top.
    """

    def __init__(self, eviction: Eviction | None = None) -> None:
        """eviction: for this tree alone. Without one, the least recently used leaf goes first."""
        self._eviction = eviction or LeafLru()
        self._nodes: dict[bytes, _Node[V]] = {}
        self._children_of_absent: dict[bytes, int] = {}
        self._uses = 0
        self._queues: list[list[tuple[int, _Node[V]]]] = [[] for _ in range(self._eviction.num_queues)]
        self._num_entries = 0
        """In all queues."""
        self._walked: list[_Node[V]] = []
        """What the last walk has yielded: not in a queue until the next one."""
        self._children_left: dict[bytes, int] = {}
        """By parent, of those that the walk has met: children that it has not yielded."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def keys(self) -> Iterator[bytes]:
        return iter(self._nodes)

    def items(self) -> Iterator[tuple[bytes, V]]:
        return ((key, node.value) for key, node in self._nodes.items())

    def insert(self, key: bytes, parent: bytes | None, value: V) -> None:
        """Add a page. `parent` is None for the first page of a prompt. Raises KeyError if the key is here."""
        if key in self._nodes:
            raise KeyError(key.hex())
        node = _Node(key, parent, value)
        self._uses += 1
        node.last_used = self._uses
        node.num_uses = self._eviction.arrived(key)
        node.num_children = self._children_of_absent.pop(key, 0)
        self._nodes[key] = node
        if not node.num_children:
            self._enqueue(node)
        if parent is not None:
            self._count_child(parent, 1)

    def get(self, key: bytes) -> V | None:
        """The page's value, without touching it."""
        node = self._nodes.get(key)
        return None if node is None else node.value

    def parent(self, key: bytes) -> bytes | None:
        """Key of the page before it, present or not; None for a first page. Raises KeyError if `key` is absent."""
        return self._nodes[key].parent

    def replace(self, key: bytes, value: V) -> V:
        """Put another value under a present key; its place and use stay. Returns the old value."""
        node = self._nodes[key]
        old, node.value = node.value, value
        return old

    def touch(self, key: bytes) -> None:
        """Make a present page the most recently used one, as part of a use that was counted before."""
        self._uses += 1
        self._nodes[key].last_used = self._uses

    def match(self, keys: Sequence[bytes]) -> list[V | None]:
        """One value per key, None for a hole. Uses what it finds, deepest first: parents outlive children."""
        nodes = list(map(self._nodes.get, keys))
        uses = self._uses
        for node in reversed(nodes):
            if node is not None:
                uses += 1
                node.last_used = uses
                node.num_uses += 1
        self._uses = uses
        return [None if node is None else node.value for node in nodes]

    def remove(self, key: bytes) -> V:
        """Forget a page and return its value. Its children stay, as pages behind a hole. Raises KeyError if absent."""
        node = self._nodes.pop(key)
        if node.num_children:
            self._children_of_absent[key] = node.num_children
        if node.parent is not None:
            self._count_child(node.parent, -1)
        self._eviction.left(key, node.num_uses, len(self._nodes))
        if self._num_entries > 2 * len(self._nodes) + _SLACK:
            self._drop_entries_of_absent()
        return node.value

    def coldest(self) -> Iterator[tuple[bytes, V]]:
        """Pages in the order in which they should go, leaves first. O(log pages) for each that is taken.

        A parent follows once its last child was yielded. Yielded keys may be removed while iterating. There is one walk
        at a time: a new one ends those before it.
        """
        self._end_walk()
        walked = self._walked = []
        while walked is self._walked and (node := self._take_coldest()) is not None:
            parent = None if node.parent is None else self._nodes.get(node.parent)
            if parent is not None:
                left = self._children_left.get(parent.key, parent.num_children) - 1
                self._children_left[parent.key] = left
                if not left:
                    self._enqueue(parent)
            walked.append(node)
            yield node.key, node.value

    def check(self) -> None:
        """Assert that the child counts are what the parent links say, and that every leaf can be found by a walk."""
        counts: dict[bytes, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                counts[node.parent] = counts.get(node.parent, 0) + 1
        for key, node in self._nodes.items():
            assert node.num_children == counts.get(key, 0), (key.hex(), node.num_children)
        absent = {key: count for key, count in counts.items() if key not in self._nodes}
        assert absent == self._children_of_absent
        entries = [*(node for queue in self._queues for _, node in queue), *self._walked]
        assert len(set(map(id, entries))) == len(entries), "a page has two entries"
        assert all(node.queued for node in entries)
        found = set(map(id, entries))
        for node in self._nodes.values():
            assert node.queued == (id(node) in found)
            assert node.queued or node.num_children, "no walk finds this leaf"
        assert sum(map(len, self._queues)) == self._num_entries <= 2 * len(self._nodes) + _SLACK

    def _count_child(self, parent: bytes, change: int) -> None:
        node = self._nodes.get(parent)
        if node is not None:
            node.num_children += change
            if not node.num_children:
                self._enqueue(node)
            return
        count = self._children_of_absent.get(parent, 0) + change
        if count:
            self._children_of_absent[parent] = count
        else:
            del self._children_of_absent[parent]

    # -- the order -------------------------------------------------------------------------------------------------

    def _enqueue(self, node: _Node[V]) -> None:
        if not node.queued:
            node.queued = True
            self._num_entries += 1
            heappush(self._queues[self._eviction.queue(node.num_uses)], (node.last_used, node))

    def _take_coldest(self) -> _Node[V] | None:
        """Out of the queues: the page that should go next. None if no leaf is left."""
        coldest: list[tuple[int, _Node[V]]] | None = None
        least = 0.0
        for index, queue in enumerate(self._queues):
            if not self._settle_head(index, queue):
                continue
            worth = self._eviction.worth(index, self._uses - queue[0][0], len(self._nodes))
            if coldest is None or worth < least:
                coldest, least = queue, worth
        if coldest is None:
            return None
        self._num_entries -= 1
        return heappop(coldest)[1]

    def _settle_head(self, index: int, queue: list[tuple[int, _Node[V]]]) -> bool:
        """Put entries right until that on top is. False if none is left."""
        while queue:
            last_used, node = queue[0]
            if not self._may_go(node):
                heappop(queue)
                self._num_entries -= 1
                node.queued = False
            elif (right := self._eviction.queue(node.num_uses)) != index:
                heappop(queue)
                heappush(self._queues[right], (node.last_used, node))
            elif node.last_used != last_used:
                heapreplace(queue, (node.last_used, node))
            else:
                return True
        return False

    def _may_go(self, node: _Node[V]) -> bool:
        """Whether it is here, and each of its children has gone or was yielded by the walk."""
        if self._nodes.get(node.key) is not node:
            return False
        return not node.num_children or self._children_left.get(node.key) == 0

    def _end_walk(self) -> None:
        walked, self._walked = self._walked, []
        self._children_left = {}
        for node in walked:
            node.queued = False
            if self._may_go(node):
                self._enqueue(node)

    def _drop_entries_of_absent(self) -> None:
        """Pages that went without having been the coldest left their entries behind: keep those from piling up."""
        for queue in self._queues:
            for _, node in queue:
                node.queued = self._may_go(node)
            queue[:] = [entry for entry in queue if entry[1].queued]
            heapify(queue)
        self._num_entries = sum(map(len, self._queues))
