"""Which pages a storage node has, and in which form: lists exactly what the arena holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.arena import Arena, Extent
from kvstore.pages import Eviction, PageLayout, PageTree
from kvstore.stored import StoredPage


@dataclass(slots=True, eq=False)
class Copy:
    """One stored form of one page.

        current --evicted, or another copy replaces it--> retired --last pin--> its extent is free

    `pins` counts leases and encodings. A current copy with a pin is never evicted, but it may be replaced.
    """

    header: StoredPage
    extent: Extent
    layout: PageLayout
    pins: int = 0
    retired: bool = False


class Index:
    """The copies of an arena: at most one current one per key, in a prefix tree, and the retired ones still in use."""

    def __init__(self, arena: Arena, eviction: Eviction) -> None:
        self._arena = arena
        self._tree: PageTree[Copy] = PageTree(eviction)
        self._retired: set[Copy] = set()
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._tree)

    def get(self, key: bytes) -> Copy | None:
        """The current copy, without touching it."""
        return self._tree.get(key)

    def touch(self, key: bytes) -> None:
        """Make a page the most recently used one, if it is here."""
        if key in self._tree:
            self._tree.touch(key)

    def match(self, keys: Sequence[bytes]) -> tuple[Copy, ...]:
        """The current copies of `keys`, in order, holes left out. Touches what it finds."""
        return tuple(copy for copy in self._tree.match(keys) if copy is not None)

    def put(self, copy: Copy, parent: bytes | None) -> None:
        """List a copy, in the place of the one that is current now if there is one."""
        key = copy.header.key
        if key in self._tree:
            self._retire(self._tree.replace(key, copy))
        else:
            self._tree.insert(key, parent, copy)
            self._note(key, self._added, self._removed)

    def coldest(self) -> Iterator[Copy]:
        """Copies without pins in the order in which they should go. They may be evicted while iterating."""
        return (copy for _, copy in self._tree.coldest() if not copy.pins)

    def evict(self, copies: Iterable[Copy]) -> None:
        """Forget these current copies, which have no pins."""
        for copy in copies:
            key = copy.header.key
            self._retire(self._tree.remove(key))
            self._note(key, self._removed, self._added)

    def unpin(self, copy: Copy) -> None:
        copy.pins -= 1
        if copy.retired and not copy.pins:
            self._retired.remove(copy)
            self._arena.free(copy.extent)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that entered and left since the last call."""
        changes = (list(self._added), list(self._removed))
        self._added.clear()
        self._removed.clear()
        return changes

    def copies(self) -> list[Copy]:
        """All of them, current and retired."""
        return [*(copy for _, copy in self._tree.items()), *self._retired]

    def check(self) -> None:
        """Assert that headers, extents and states agree."""
        self._tree.check()
        for key, copy in self._tree.items():
            assert copy.header.key == key
            assert not copy.retired
        assert all(copy.retired and copy.pins for copy in self._retired)
        for copy in self.copies():
            assert (copy.header.offset_bytes, copy.header.num_bytes) == (
                copy.extent.offset_bytes,
                copy.extent.num_bytes,
            )
        assert not self._added & self._removed

    def _retire(self, copy: Copy) -> None:
        copy.retired = True
        if copy.pins:
            self._retired.add(copy)
        else:
            self._arena.free(copy.extent)

    @staticmethod
    def _note(key: bytes, into: set[bytes], other: set[bytes]) -> None:
        if key in other:
            other.remove(key)
        else:
            into.add(key)
