"""What a storage node decides: which pages it keeps, lends, takes and gives up.

Plain and synchronous: events and the time go in, decisions come out. Sockets, threads and the transport are the
business of `keeper.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore.codecs import CODECS, Bytes, Codec
from kvstore.node.arena import Arena, Extent
from kvstore.node.decisions import DigestExtents, Encoding, Lent, OfferedPage, OfferPlan, Written
from kvstore.node.leases import Leases
from kvstore.node.writes import Writes
from kvstore.pages import PageTree
from kvstore.stored import StoredPage

_WRITE_BEHIND = "lossless"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreBounds:
    """What clients may take, and what an eviction takes at once."""

    max_lease_s: float = 30.0
    """Longest hold that a reader is granted; it may ask for less."""
    max_writing_share: float = 0.25
    """Share of the memory that offers may fill before their pages count, pulls that never settle included."""
    spare_share: float = 1 / 64
    """Share of the memory that is evicted at once: finding the coldest pages walks the whole tree."""

    def __post_init__(self) -> None:
        if self.max_lease_s <= 0:
            raise ValueError(f"max_lease_s must be > 0, got {self.max_lease_s}")
        if not 0 < self.max_writing_share <= 1:
            raise ValueError(f"max_writing_share must be in (0, 1], got {self.max_writing_share}")
        if not 0 <= self.spare_share < 1:
            raise ValueError(f"spare_share must be in [0, 1), got {self.spare_share}")


@dataclass(slots=True, eq=False)
class _Copy:
    """One stored form of one page.

        current --evicted, or another copy replaces it--> retired --last pin--> its extent is free

    `pins` counts leases and encodings. A current copy with a pin is never evicted, but it may be replaced.
    """

    header: StoredPage
    extent: Extent
    itemsize: int
    pins: int = 0
    retired: bool = False


@dataclass(slots=True)
class _Eviction:
    """One walk over the coldest pages, for all that an offer needs."""

    cold: Iterator[tuple[bytes, _Copy]]
    spare_bytes: float
    """Still to be freed beyond what is needed, so that the next offers need no walk."""


class Store:
    """The pages of one storage node: an index that lists exactly what the arena holds."""

    def __init__(
        self,
        arena: Arena,
        incarnation: str,
        bounds: StoreBounds,
        *,
        write_behind: bool = True,
        codecs: Mapping[str, Codec] = CODECS,
    ) -> None:
        """incarnation: of the node, new at every start of its process.
        write_behind: whether raw pages are to be re-encoded losslessly.
        """
        self.arena = arena
        self.num_served = 0
        """Pages lent so far."""
        self.num_stored = 0
        """Pages taken from offers so far."""
        self.num_evicted = 0
        self._bounds = bounds
        self._write_behind = write_behind
        self._codecs = codecs
        self._tree: PageTree[_Copy] = PageTree()
        self._retired: set[_Copy] = set()
        self._leases: Leases[_Copy] = Leases(incarnation)
        self._writes = Writes(arena)
        self._to_encode: dict[bytes, _Copy] = {}  # current raw copies, longest waiting first
        self._encodings: dict[int, _Copy] = {}
        self._num_encodings = 0
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()

    # -- what it holds ---------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages that a match can find."""
        return len(self._tree)

    @property
    def num_evictable(self) -> int:
        """Pages that nobody has on lease."""
        return len(self._tree) - len({copy for copy in self._leases.held() if not copy.retired})

    @property
    def num_quarantined(self) -> int:
        """Pages of pulls that nobody waits for and that have not settled."""
        return self._writes.num_quarantined

    @property
    def num_to_encode(self) -> int:
        """Raw pages that write-behind has not finished with."""
        return len(self._to_encode) + len(self._encodings)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the arena in use, by pages of the index or otherwise."""
        return self.arena.capacity_bytes - self.arena.free_bytes

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that entered and left the index since the last call."""
        changes = (list(self._added), list(self._removed))
        self._added.clear()
        self._removed.clear()
        return changes

    # -- lending ---------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], lease_s: float, now_s: float) -> Lent:
        """Lend what is here of `keys`, for `lease_s` at most."""
        self._end_leases(now_s)
        copies = tuple(copy for copy in self._tree.match(keys) if copy is not None)
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
            self._unpin(copy)
        return copies is not None

    # -- taking ----------------------------------------------------------------------------------------------------

    def offer(self, pages: Sequence[OfferedPage], itemsize: int, deadline_s: float, now_s: float) -> OfferPlan:
        """Decide which pages to take, and make room for them.

        pages: of different keys. A page is known if a copy of at least as good a lineage is here, and refused if it
        does not fit or another offer is just bringing it.
        """
        self._end_leases(now_s)
        known: list[bytes] = []
        refused: list[bytes] = []
        wanted: list[OfferedPage] = []
        for page in pages:
            # In use, both: a worker had the page until now, and what comes would be worth less without its parent.
            for key in (page.key, page.parent):
                if key is not None and key in self._tree:
                    self._tree.touch(key)
            if self._has(page):
                known.append(page.key)
            elif page.key in self._writes:
                refused.append(page.key)
            else:
                wanted.append(page)
        taken: dict[Extent, OfferedPage] = {}
        limit_bytes = self._bounds.max_writing_share * self.arena.capacity_bytes - self._writes.num_bytes
        eviction = _Eviction(self._tree.coldest(), self._bounds.spare_share * self.arena.capacity_bytes)
        for page in wanted:
            fits = Extent(0, page.num_bytes).occupied_bytes <= limit_bytes
            extent = self._room(page.num_bytes, eviction) if fits else None
            if extent is None:
                refused.append(page.key)
                continue
            limit_bytes -= extent.occupied_bytes
            taken[extent] = page
        pull = self._writes.begin(list(taken.values()), list(taken), itemsize, deadline_s) if taken else None
        return OfferPlan(tuple(known), tuple(refused), pull)

    def pull_settled(self, write_id: int, error: str | None, mismatched: Collection[int]) -> DigestExtents | Written:
        """Nothing of this pull lands any more. `mismatched`: places in its plan whose digests differ."""
        return self._writes.settled(write_id, error, mismatched)

    def digested(self, write_id: int, stored_digests: Sequence[int]) -> Written:
        """`bytes_digest` of each extent of `DigestExtents`, in its order: the pages count from here on."""
        write = self._writes.finish(write_id)
        if not write.abandoned:
            for page, extent, stored_digest in zip(write.pages, write.extents, stored_digests, strict=True):
                self._commit(page, extent, write.itemsize, stored_digest)
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
        if not self._to_encode:
            return None
        copy = self._to_encode.pop(next(iter(self._to_encode)))
        copy.pins += 1
        self._num_encodings += 1
        self._encodings[self._num_encodings] = copy
        page = self.arena.view(copy.extent)
        return Encoding(self._num_encodings, page, copy.itemsize, self._codecs[_WRITE_BEHIND])

    def encoded(self, encoding_id: int, stored: Bytes | None, stored_digest: int) -> bool:
        """Put the encoded form in the raw one's place. Readers of the raw one keep it until they let go.

        stored: None if encoding failed. Returns False, and leaves the page raw, where the form is not smaller, or where
        readers hold the raw one and there is no room beside it. Nothing is evicted.
        """
        copy = self._encodings.pop(encoding_id)
        smaller = stored is not None and 0 < len(stored) < copy.extent.num_bytes
        if stored is None or not smaller or copy.retired:
            self._unpin(copy)
            return False
        extent = self.arena.allocate(len(stored))
        if extent is None and copy.pins == 1:
            # Nobody reads the raw bytes, so that half-encoded ones can mislead at most a reader whose lease is over.
            extent = copy.extent = self.arena.shrink(copy.extent, len(stored))
        if extent is None:
            self._unpin(copy)
            return False
        self.arena.view(extent)[:] = stored
        header = replace(
            copy.header,
            offset_bytes=extent.offset_bytes,
            num_bytes=extent.num_bytes,
            codec=_WRITE_BEHIND,
            stored_digest=stored_digest,
        )
        if extent is copy.extent:
            copy.header = header
        else:
            self._replace(_Copy(header, extent, copy.itemsize))
        self._unpin(copy)
        return True

    # -- invariants ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant; O(pages)."""
        for part in (self.arena, self._tree, self._leases, self._writes):
            part.check()
        current = dict(self._tree.items())
        copies = [*current.values(), *self._retired]
        extents = [*(copy.extent for copy in copies), *self._writes.extents()]
        assert sorted(extents, key=lambda e: e.offset_bytes) == self.arena.extents(), "an extent has no or two users"
        pins = Counter([*self._leases.held(), *self._encodings.values()])
        assert all(copy.pins == pins[copy] for copy in copies)
        assert set(pins) <= set(copies), "a pinned copy was dropped"
        for copy in copies:
            assert (copy.header.offset_bytes, copy.header.num_bytes) == (
                copy.extent.offset_bytes,
                copy.extent.num_bytes,
            )
        for key, copy in current.items():
            assert copy.header.key == key
            assert not copy.retired
        assert all(copy.retired and copy.pins for copy in self._retired)
        for key, copy in self._to_encode.items():
            assert copy.header.codec == "raw"
            assert current[key] is copy
        assert not self._added & self._removed

    # -- inside ----------------------------------------------------------------------------------------------------

    def _has(self, page: OfferedPage) -> bool:
        copy = self._tree.get(page.key)
        return copy is not None and self._loss(copy.header.lineage) <= self._loss(page.lineage)

    def _loss(self, codec: str) -> int:
        return self._codecs[codec].loss

    def _room(self, num_bytes: int, eviction: _Eviction) -> Extent | None:
        """An extent, evicting where needed. None if that cannot help, and then nothing is evicted."""
        extent = self.arena.allocate(num_bytes)
        if extent is not None:
            return extent
        needed = Extent(0, num_bytes).occupied_bytes
        trial = self.arena.holes()
        enough = trial.free_bytes + eviction.spare_bytes
        victims: list[bytes] = []
        for key, copy in eviction.cold:
            if copy.pins:
                continue
            trial.give(copy.extent.offset_bytes, copy.extent.occupied_bytes)
            victims.append(key)
            if trial.largest_bytes >= needed and trial.free_bytes >= enough:
                break
        if trial.largest_bytes < needed:
            return None
        eviction.spare_bytes = 0
        for key in victims:
            self._retire(self._tree.remove(key))
            self._note(key, self._removed, self._added)
        self.num_evicted += len(victims)
        return self.arena.allocate(num_bytes)

    def _commit(self, page: OfferedPage, extent: Extent, itemsize: int, stored_digest: int) -> None:
        header = StoredPage(
            key=page.key,
            offset_bytes=extent.offset_bytes,
            num_bytes=extent.num_bytes,
            codec="raw",
            lineage=page.lineage,
            stored_digest=stored_digest,
            digests=page.digests,
        )
        copy = _Copy(header, extent, itemsize)
        if page.key in self._tree:
            # The offer was of a better lineage, and nobody else could bring this key meanwhile.
            self._replace(copy)
        else:
            self._tree.insert(page.key, page.parent, copy)
            self._note(page.key, self._added, self._removed)
        self.num_stored += 1
        if self._write_behind:
            self._to_encode[page.key] = copy

    def _replace(self, copy: _Copy) -> None:
        self._retire(self._tree.replace(copy.header.key, copy))

    def _retire(self, copy: _Copy) -> None:
        """The index no longer lists this copy."""
        copy.retired = True
        self._to_encode.pop(copy.header.key, None)
        if copy.pins:
            self._retired.add(copy)
        else:
            self.arena.free(copy.extent)

    def _unpin(self, copy: _Copy) -> None:
        copy.pins -= 1
        if copy.retired and not copy.pins:
            self._retired.remove(copy)
            self.arena.free(copy.extent)

    def _end_leases(self, now_s: float) -> None:
        for copy in self._leases.end_expired(now_s):
            self._unpin(copy)

    @staticmethod
    def _note(key: bytes, into: set[bytes], other: set[bytes]) -> None:
        if key in other:
            other.remove(key)
        else:
            into.add(key)
