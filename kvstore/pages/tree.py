"""The one radix tree of this project: pages by key, linked to their parents.

Keys commit to the whole prefix (`kvstore/pages/keys.py`), so an edge is one page and a look-up needs no token ids.
Workers keep page ids in it, storage nodes keep headers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

V = TypeVar("V")


class _Node(Generic[V]):
    __slots__ = ("key", "last_used", "num_children", "parent", "value")

    def __init__(self, key: bytes, parent: bytes | None, value: V, last_used: int) -> None:
        self.key = key
        self.parent = parent
        self.value = value
        self.last_used = last_used
        self.num_children = 0


class PageTree(Generic[V]):
    """Pages by key, with holes allowed: a page whose parent is absent stays valid and findable.

    Use has an order and no clock: `match`, `touch` and `insert` make a page the most recently used one.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node[V]] = {}
        self._children_of_absent: dict[bytes, int] = {}
        self._uses = 0

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
        node = _Node(key, parent, value, self._next_use())
        node.num_children = self._children_of_absent.pop(key, 0)
        self._nodes[key] = node
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
        """Make a present page the most recently used one."""
        self._nodes[key].last_used = self._next_use()

    def match(self, keys: Sequence[bytes]) -> list[V | None]:
        """One value per key, None for a hole. Touches what it finds, deepest first: parents outlive children."""
        nodes = [self._nodes.get(key) for key in keys]
        for node in reversed(nodes):
            if node is not None:
                node.last_used = self._next_use()
        return [None if node is None else node.value for node in nodes]

    def remove(self, key: bytes) -> V:
        """Forget a page and return its value. Its children stay, as pages behind a hole. Raises KeyError if absent."""
        node = self._nodes.pop(key)
        if node.num_children:
            self._children_of_absent[key] = node.num_children
        if node.parent is not None:
            self._count_child(node.parent, -1)
        return node.value

    def coldest(self) -> Iterator[tuple[bytes, V]]:
        """Pages in the order in which they should go: leaves first, least recently used first.

        A parent follows once its last child was yielded. Yielded keys may be removed while iterating.
        """
        left = {key: node.num_children for key, node in self._nodes.items() if node.num_children}
        heap = [(node.last_used, key) for key, node in self._nodes.items() if not node.num_children]
        heapq.heapify(heap)
        while heap:
            last_used, key = heapq.heappop(heap)
            node = self._nodes.get(key)
            if node is None or node.last_used != last_used:
                continue
            parent = node.parent
            yield key, node.value
            if parent is not None and parent in left:
                left[parent] -= 1
                if not left[parent] and parent in self._nodes:
                    heapq.heappush(heap, (self._nodes[parent].last_used, parent))

    def check(self) -> None:
        """Assert that the child counts are what the parent links say."""
        counts: dict[bytes, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                counts[node.parent] = counts.get(node.parent, 0) + 1
        for key, node in self._nodes.items():
            assert node.num_children == counts.get(key, 0), (key.hex(), node.num_children)
        absent = {key: count for key, count in counts.items() if key not in self._nodes}
        assert absent == self._children_of_absent

    def _count_child(self, parent: bytes, change: int) -> None:
        node = self._nodes.get(parent)
        if node is not None:
            node.num_children += change
            return
        count = self._children_of_absent.get(parent, 0) + change
        if count:
            self._children_of_absent[parent] = count
        else:
            del self._children_of_absent[parent]

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses
