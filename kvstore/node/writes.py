"""Pages on their way into the arena."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.arena import Arena, Extent
from kvstore.node.decisions import DigestExtents, OfferedPage, PlannedPull, Written
from kvstore.pages import PageLayout


@dataclass(slots=True, eq=False)
class Write:
    """The pages of one pull.

        PULLING --settled--> DIGESTING --finish--> the pages are the store's
           |                     |
           +------abandon--------+--> ABANDONED --settled or finish, whichever was awaited--> the extents are free

    Bytes may land until the pull has settled, so an abandoned write keeps its extents until then; its keys are free to
    be offered again.
    """

    pages: list[OfferedPage]
    extents: list[Extent]
    """One per page; those of an abandoned write are quarantined."""
    layout: PageLayout
    deadline_s: float
    refused: list[bytes] = field(default_factory=list)
    abandoned: bool = False


class Writes:
    """All unfinished writes: which keys they bring and which extents they own."""

    def __init__(self, arena: Arena) -> None:
        self.num_bytes = 0
        """Of the arena, in extents of unfinished writes."""
        self._arena = arena
        self._writes: dict[int, Write] = {}
        self._keys: set[bytes] = set()
        self._num_begun = 0

    def __contains__(self, key: bytes) -> bool:
        """Whether somebody is just bringing this page."""
        return key in self._keys

    @property
    def num_quarantined(self) -> int:
        """Extents of writes that nobody waits for and whose bytes may still land."""
        return sum(len(write.extents) for write in self._writes.values() if write.abandoned)

    @property
    def next_deadline_s(self) -> float | None:
        return min((write.deadline_s for write in self._writes.values() if not write.abandoned), default=None)

    def late(self, now_s: float) -> list[int]:
        """Ids of the writes that somebody waits for past their deadline."""
        return [key for key, write in self._writes.items() if not write.abandoned and write.deadline_s <= now_s]

    def begin(
        self, pages: Sequence[OfferedPage], extents: Sequence[Extent], layout: PageLayout, deadline_s: float
    ) -> PlannedPull:
        """The extents are this write's from now on."""
        self._num_begun += 1
        self._writes[self._num_begun] = Write(list(pages), list(extents), layout, deadline_s)
        self._keys.update(page.key for page in pages)
        self.num_bytes += sum(extent.occupied_bytes for extent in extents)
        return PlannedPull(self._num_begun, tuple(pages), tuple(extents))

    def settled(self, write_id: int, error: str | None, mismatched: Collection[int]) -> DigestExtents | Written:
        """Nothing lands any more: frees the extents of what failed, all of them if there was an error."""
        write = self._writes[write_id]
        failed = range(len(write.extents)) if write.abandoned or error is not None else mismatched
        for place in sorted(failed, reverse=True):
            self._free(write.extents.pop(place))
            if not write.abandoned:
                self._refuse(write, write.pages.pop(place))
        if write.extents:
            return DigestExtents(write_id, tuple(write.extents))
        del self._writes[write_id]
        return Written(write_id, (), tuple(write.refused))

    def finish(self, write_id: int) -> Write:
        """The write as it ends: the extents of its pages are the caller's, and it has no pages if it was abandoned."""
        write = self._writes.pop(write_id)
        for extent in write.extents:
            self.num_bytes -= extent.occupied_bytes
            if write.abandoned:
                self._arena.free(extent)
        self._keys.difference_update(page.key for page in write.pages)
        return write

    def abandon(self, write_id: int) -> tuple[bytes, ...]:
        """Nobody waits for this write any more. Returns all keys that it did not bring; none if it has ended."""
        write = self._writes.get(write_id)
        if write is None:
            return ()
        write.abandoned = True
        for page in write.pages:
            self._refuse(write, page)
        write.pages.clear()
        return tuple(write.refused)

    def extents(self) -> Iterator[Extent]:
        for write in self._writes.values():
            yield from write.extents

    def check(self) -> None:
        """Assert that keys and bytes are those of the unfinished writes."""
        for write in self._writes.values():
            assert len(write.pages) == (0 if write.abandoned else len(write.extents))
        keys = [page.key for write in self._writes.values() for page in write.pages]
        assert sorted(keys) == sorted(self._keys)
        assert self.num_bytes == sum(extent.occupied_bytes for extent in self.extents())

    def _refuse(self, write: Write, page: OfferedPage) -> None:
        write.refused.append(page.key)
        self._keys.remove(page.key)

    def _free(self, extent: Extent) -> None:
        self.num_bytes -= extent.occupied_bytes
        self._arena.free(extent)
