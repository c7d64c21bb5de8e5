"""A worker's pages: one pool, its ledger, and the prefix tree over the pages worth keeping."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.owners import fragment_key, fragment_pages
from kvstore.pages.layout import PageLayout
from kvstore.pages.ledger import Ledger, OutOfPages, Owner, PinKind
from kvstore.pages.tree import PageTree


def allocate_region(num_bytes: int) -> npt.NDArray[np.uint8]:
    """uint8 [num_bytes], page-aligned, zeroed and touched: the first use of an untouched pool is ten times slower.

    Huge pages where the kernel gives them: attention over scattered pages is then about a tenth faster.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    region = np.frombuffer(memory, dtype=np.uint8)
    region[:: mmap.PAGESIZE] = 0
    return region


@dataclass(frozen=True, slots=True)
class ColdPage:
    """A page that is about to leave the pool, pinned until `PageCache.written_out`."""

    key: bytes
    parent: bytes | None
    """Key of the page before it; None for a first page."""
    fragment_key: bytes
    """Decides which storage node owns it; see `kvstore/owners.py`."""
    page: int


class PageCache:
    """The pool of one worker. Owned by the step loop; no method blocks, none does I/O.

    Requests `take` what the tree has, `reserve` the rest, fill and `publish` it, and let go by `release`. The owner of
    the loop calls `reclaim` on its own clock, so that pages are written out before somebody needs their room.
    """

    def __init__(self, layout: PageLayout, region: npt.NDArray[np.uint8], num_pages: int) -> None:
        """region: uint8, at least num_pages * page_bytes, registered with the transport; page i at i * page_bytes."""
        self.layout = layout
        self.ledger = Ledger(num_pages)
        self.pages = region[: num_pages * layout.page_bytes].reshape(num_pages, layout.page_bytes)
        self.evicted_unsaved = 0
        """Pages that were given up without having been offered to a storage node."""
        self._tree: PageTree[int] = PageTree()
        self._key_of: dict[int, bytes] = {}
        self._fragment_pages = fragment_pages(layout.page_size)
        self._fragment_key_of: dict[int, bytes] = {}
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._num_encoding = 0

    @property
    def num_cached(self) -> int:
        return len(self._tree)

    @property
    def pages_free(self) -> int:
        return self.ledger.pages_free

    def offset_bytes(self, page: int) -> int:
        """Where the page lies in the region."""
        return page * self.layout.page_bytes

    def matched(self, keys: Sequence[bytes]) -> list[int | None]:
        """Page ids of the keys that are here, holes as None. Neither pins nor touches."""
        return [self._tree.get(key) for key in keys]

    def take(self, keys: Sequence[bytes]) -> list[int | None]:
        """Like `matched`, but pins what it finds for a request and makes it the most recently used."""
        pages = self._tree.match(keys)
        for page in pages:
            if page is not None:
                self.ledger.pin(page, PinKind.REQUEST)
        return pages

    def reserve(self, num_pages: int) -> list[int]:
        """RESERVED pages, evicting the coldest where nothing is free. Raises OutOfPages and then changes nothing."""
        if num_pages > self.ledger.pages_free:
            raise OutOfPages(num_pages, self.ledger.pages_free)
        if num_pages > self.ledger.num_free:
            self._evict(num_pages - self.ledger.num_free)
        return self.ledger.reserve(num_pages)

    def publish(self, page: int, keys: Sequence[bytes], index: int) -> bool:
        """Put a complete page into the tree, pinned for the request that holds it.

        keys: of the request's pages from the first one on, at least to `index`, the place of this page among them.
        Returns False, and leaves the page with its request, where the tree has another page of this key.
        """
        key = keys[index]
        if key in self._tree:
            return False
        self._tree.insert(key, keys[index - 1] if index else None, page)
        self.ledger.publish(page)
        self.ledger.pin(page, PinKind.REQUEST)
        self._key_of[page] = key
        self._fragment_key_of[page] = fragment_key(keys, index, self._fragment_pages)
        self._note(key, self._added, self._removed)
        return True

    def release(self, page: int) -> None:
        """A request lets go of one page of its block table, shared or its own."""
        if self.ledger.owner(page) is Owner.TREE:
            self.ledger.unpin(page, PinKind.REQUEST)
        else:
            self.ledger.retire(page)

    def reclaim(self, target_free: int, limit: int) -> list[ColdPage]:
        """Coldest unpinned pages, at most `limit`, that must be written out for `target_free` pages to be free.

        They are pinned ENCODING. Pages already on their way out count as free. They stay in the tree and can be
        taken until `written_out`.
        """
        missing = target_free - self.ledger.num_free - self._num_encoding
        cold: list[ColdPage] = []
        if missing <= 0 or not self.ledger.num_evictable:
            return cold
        for key, page in self._tree.coldest():
            if self.ledger.pins(page):
                continue
            self.ledger.pin(page, PinKind.ENCODING)
            self._num_encoding += 1
            cold.append(ColdPage(key, self._tree.parent(key), self._fragment_key_of[page], page))
            if len(cold) >= min(missing, limit):
                break
        return cold

    def written_out(self, cold: Sequence[ColdPage]) -> None:
        """Nobody reads these for a storage node any more: free those that no request took meanwhile."""
        for entry in cold:
            self.ledger.unpin(entry.page, PinKind.ENCODING)
            self._num_encoding -= 1
        for entry in cold:
            if not self.ledger.pins(entry.page):
                self._drop(entry.key)

    def evict_all(self) -> None:
        """Drop every page that nobody uses."""
        self._evict(self.ledger.num_evictable, count=False)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that entered and left the tree since the last call."""
        changes = (list(self._added), list(self._removed))
        self._added.clear()
        self._removed.clear()
        return changes

    def check(self) -> None:
        """Assert every invariant of ledger and tree; O(pages)."""
        self.ledger.check()
        self._tree.check()
        in_tree = {page: key for key, page in self._tree.items()}
        assert in_tree == self._key_of
        assert self._fragment_key_of.keys() == self._key_of.keys()
        owners = {page for page in range(self.ledger.num_pages) if self.ledger.owner(page) is Owner.TREE}
        assert owners == set(in_tree)
        assert self._num_encoding == sum(self.ledger.pins(page, PinKind.ENCODING) for page in owners)

    def _evict(self, num_pages: int, *, count: bool = True) -> None:
        if num_pages <= 0:
            return
        evicted = 0
        for key, page in self._tree.coldest():
            if self.ledger.pins(page):
                continue
            self._drop(key)
            evicted += 1
            if evicted == num_pages:
                break
        if count:
            self.evicted_unsaved += evicted

    def _drop(self, key: bytes) -> None:
        page = self._tree.remove(key)
        del self._key_of[page], self._fragment_key_of[page]
        self.ledger.evict(page)
        self._note(key, self._removed, self._added)

    @staticmethod
    def _note(key: bytes, into: set[bytes], other: set[bytes]) -> None:
        if key in other:
            other.discard(key)
        else:
            into.add(key)
