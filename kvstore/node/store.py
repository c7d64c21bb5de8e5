"""What a storage node decides: which pages it keeps, lends, takes and gives up.

Plain and synchronous: events and the time go in, decisions come out. Sockets, threads and the transport are the
business of `keeper.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvstore.arena import Arena, Extent
from kvstore.codecs import CODECS, Bytes, Codec, is_within
from kvstore.node.decisions import DigestExtents, Encoding, Lent, OfferedPage, OfferPlan, Written
from kvstore.node.index import Copy, Index
from kvstore.node.leases import Leases
from kvstore.node.write_behind import WriteBehind
from kvstore.node.writes import Writes
from kvstore.pages import Eviction, LeafFrequency, PageLayout
from kvstore.stored import StoredPage


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreBounds:
    """What clients may take."""

    max_lease_s: float = 30.0
    """Longest hold that a reader is granted; it may ask for less."""
    max_writing_share: float = 0.25
    """Share of the memory that offers may fill before their pages count, pulls that never settle included."""

    def __post_init__(self) -> None:
        if self.max_lease_s <= 0:
            raise ValueError(f"max_lease_s must be > 0, got {self.max_lease_s}")
        if not 0 < self.max_writing_share <= 1:
            raise ValueError(f"max_writing_share must be in (0, 1], got {self.max_writing_share}")


class Store:
    """The pages of one storage node. Time is an argument: instants of `boot_time_s`."""

    def __init__(
        self,
        arena: Arena,
        incarnation: str,
        bounds: StoreBounds,
        *,
        write_behind: bool = True,
        codecs: Mapping[str, Codec] = CODECS,
        eviction: Eviction | None = None,
    ) -> None:
        """incarnation: of the node, new at every start of its process.
        write_behind: whether raw pages are to be re-encoded losslessly.
        eviction: which pages go first when there is no room; by how often they were used, without one.
        """
        self.arena = arena
        self.num_served = 0
        """Pages lent so far."""
        self.num_stored = 0
        """Pages taken from offers so far."""
        self.num_evicted = 0
        self._bounds = bounds
        self._codecs = codecs
        self._index = Index(arena, eviction or LeafFrequency())
        self._leases: Leases[Copy] = Leases(incarnation)
        self._writes = Writes(arena)
        self._write_behind = WriteBehind(arena, self._index, codecs) if write_behind else None

    # -- what it holds ---------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages that a match can find."""
        return len(self._index)

    @property
    def num_evictable(self) -> int:
        """Pages that nobody has on lease."""
        return len(self._index) - len({copy for copy in self._leases.held() if not copy.retired})

    @property
    def num_quarantined(self) -> int:
        """Pages of pulls that nobody waits for and that have not settled."""
        return self._writes.num_quarantined

    @property
    def num_to_encode(self) -> int:
        """Raw pages that write-behind has not finished with."""
        return 0 if self._write_behind is None else len(self._write_behind)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the arena in use, by pages of the index or otherwise."""
        return self.arena.capacity_bytes - self.arena.free_bytes

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that entered and left the index since the last call."""
        return self._index.drain_changes()

    # -- lending ---------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], lease_s: float, now_s: float) -> Lent:
        """Lend what is here of `keys`, for `lease_s` at most."""
        self._end_leases(now_s)
        copies = self._index.match(keys)
        if not copies:
            return Lent("", now_s, ())
        for copy in copies:
            copy.pins += 1
        expires_s = now_s + min(lease_s, self._bounds.max_lease_s)
        self.num_served += len(copies)
        return Lent(self._leases.grant(copies, expires_s), expires_s, tuple(copy.header for copy in copies))

    def release(self, lease_id: str, now_s: float) -> bool:
        """The reader has finished. False if there is no such lease, or it has expired."""
        self._end_leases(now_s)
        copies = self._leases.end(lease_id)
        for copy in copies or ():
            self._index.unpin(copy)
        return copies is not None

    # -- taking ----------------------------------------------------------------------------------------------------

    def offer(self, pages: Sequence[OfferedPage], layout: PageLayout, deadline_s: float, now_s: float) -> OfferPlan:
        """Decide which pages to take, and make room for them.

        pages: of different keys, all of this layout. A page is known if a copy of at least as good a lineage is here,
        and refused if it does not fit or another offer is just bringing it.
        """
        self._end_leases(now_s)
        known: list[bytes] = []
        refused: list[bytes] = []
        wanted: list[OfferedPage] = []
        for page in pages:
            # In use, both: a worker had the page until now, and what comes would be worth less without its parent.
            self._index.touch(page.key)
            if page.parent is not None:
                self._index.touch(page.parent)
            if self._has(page):
                known.append(page.key)
            elif page.key in self._writes:
                refused.append(page.key)
            else:
                wanted.append(page)
        taken: dict[Extent, OfferedPage] = {}
        limit_bytes = self._bounds.max_writing_share * self.arena.capacity_bytes - self._writes.num_bytes
        rest_bytes = sum(Extent(0, page.num_bytes).occupied_bytes for page in wanted)
        for page in wanted:
            occupied_bytes = Extent(0, page.num_bytes).occupied_bytes
            fits = occupied_bytes <= limit_bytes
            extent = self._room(page.num_bytes, min(rest_bytes, limit_bytes)) if fits else None
            rest_bytes -= occupied_bytes
            if extent is None:
                refused.append(page.key)
                continue
            limit_bytes -= extent.occupied_bytes
            taken[extent] = page
        pull = self._writes.begin(list(taken.values()), list(taken), layout, deadline_s) if taken else None
        return OfferPlan(tuple(known), tuple(refused), pull)

    def pull_settled(self, write_id: int, error: str | None, mismatched: Collection[int]) -> DigestExtents | Written:
        """Nothing of this pull lands any more. `mismatched`: places in its plan whose digests differ."""
        return self._writes.settled(write_id, error, mismatched)

    def digested(self, write_id: int, stored_digests: Sequence[int]) -> Written:
        """`bytes_digest` of each extent of `DigestExtents`, in its order: the pages count from here on."""
        write = self._writes.finish(write_id)
        if not write.abandoned:
            for page, extent, stored_digest in zip(write.pages, write.extents, stored_digests, strict=True):
                self._commit(page, extent, write.layout, stored_digest)
        return Written(write_id, tuple(page.key for page in write.pages), tuple(write.refused))

    def abandon(self, write_id: int) -> None:
        """Nobody waits for this write any more: its extents stay quarantined until the event that it awaits.

        Without effect on one that has ended or was abandoned before.
        """
        self._writes.abandon(write_id)

    # -- time ------------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """No call of `expire` before this instant has anything to do; None: not as things are."""
        deadlines = (self._leases.next_expiry_s, self._writes.next_deadline_s)
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def expire(self, now_s: float) -> list[Written]:
        """End the leases whose time is over, and abandon the writes whose deadline has passed: those are returned."""
        self._end_leases(now_s)
        return [Written(write_id, (), self._writes.abandon(write_id)) for write_id in self._writes.late(now_s)]

    # -- write-behind ----------------------------------------------------------------------------------------------

    def next_encoding(self) -> Encoding | None:
        """The raw page that has waited longest; None if none waits."""
        return None if self._write_behind is None else self._write_behind.begin()

    def encoded(self, encoding_id: int, stored: Bytes | None, stored_digest: int) -> bool:
        """The encoded form of a page, None if encoding failed. Says whether it has taken the raw one's place."""
        assert self._write_behind is not None
        return self._write_behind.end(encoding_id, stored, stored_digest)

    # -- invariants ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant; O(pages)."""
        for part in (self.arena, self._index, self._leases, self._writes):
            part.check()
        encoding: list[Copy] = []
        if self._write_behind is not None:
            self._write_behind.check()
            encoding = self._write_behind.pinned()
        copies = self._index.copies()
        extents = [*(copy.extent for copy in copies), *self._writes.extents()]
        assert sorted(extents, key=lambda e: e.offset_bytes) == self.arena.extents(), "an extent has no or two users"
        pins = Counter([*self._leases.held(), *encoding])
        assert all(copy.pins == pins[copy] for copy in copies)
        assert set(pins) <= set(copies), "a pinned copy was dropped"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _has(self, page: OfferedPage) -> bool:
        copy = self._index.get(page.key)
        return copy is not None and is_within(copy.header.lineage, page.lineage, self._codecs)

    def _room(self, num_bytes: int, with_rest_bytes: float) -> Extent | None:
        """An extent, evicting where needed. None if that cannot help, and then nothing is evicted.

        with_rest_bytes: that the offer needs from here on, this page included; evicted for at once, because trying out
        what would make room starts with a copy of the holes.
        """
        extent = self.arena.allocate(num_bytes)
        if extent is not None:
            return extent
        needed = Extent(0, num_bytes).occupied_bytes
        trial = self.arena.holes()
        victims: list[Copy] = []
        for copy in self._index.coldest():
            trial.give(copy.extent.offset_bytes, copy.extent.occupied_bytes)
            victims.append(copy)
            if trial.largest_bytes >= needed and trial.free_bytes >= with_rest_bytes:
                break
        if trial.largest_bytes < needed:
            return None
        self._index.evict(victims)
        self.num_evicted += len(victims)
        return self.arena.allocate(num_bytes)

    def _commit(self, page: OfferedPage, extent: Extent, layout: PageLayout, stored_digest: int) -> None:
        header = StoredPage(
            key=page.key,
            offset_bytes=extent.offset_bytes,
            num_bytes=extent.num_bytes,
            codec="raw",
            lineage=page.lineage,
            stored_digest=stored_digest,
            digests=page.digests,
        )
        copy = Copy(header, extent, layout)
        # A current copy is of a worse lineage: else the page was known, and nobody else can have brought it meanwhile.
        self._index.put(copy, page.parent)
        self.num_stored += 1
        if self._write_behind is not None:
            self._write_behind.add(copy)

    def _end_leases(self, now_s: float) -> None:
        for copy in self._leases.end_expired(now_s):
            self._index.unpin(copy)
