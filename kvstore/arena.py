"""A region of memory, registered with the transport, handed out in extents of any size."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.codecs import Bytes
from kvstore.holes import Holes

GRANULE_BYTES = 512
"""Extents start at and occupy whole multiples of this, so that sizes that differ by little fit each other's place."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of the region that belong to one stored copy or to one pull."""

    offset_bytes: int
    num_bytes: int

    @property
    def occupied_bytes(self) -> int:
        """What it takes from the arena: `num_bytes` in whole granules."""
        return -(-self.num_bytes // GRANULE_BYTES) * GRANULE_BYTES


class Arena:
    """Extents of one region. Knows who has what, not why."""

    def __init__(self, region: Bytes) -> None:
        """region: uint8 [n], touched; bytes behind the last whole granule stay unused."""
        self.region = region
        self.capacity_bytes = len(region) // GRANULE_BYTES * GRANULE_BYTES
        self._holes = Holes(self.capacity_bytes)
        self._taken: dict[int, Extent] = {}

    @property
    def free_bytes(self) -> int:
        return self._holes.free_bytes

    def allocate(self, num_bytes: int) -> Extent | None:
        """An extent of `num_bytes` >= 1 bytes, or None where no hole is large enough."""
        offset = self._holes.take(Extent(0, num_bytes).occupied_bytes)
        if offset is None:
            return None
        extent = self._taken[offset] = Extent(offset, num_bytes)
        return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back. Raises KeyError if it was not allocated, or has been freed."""
        if self._taken.get(extent.offset_bytes) != extent:
            raise KeyError(extent)
        del self._taken[extent.offset_bytes]
        self._holes.give(extent.offset_bytes, extent.occupied_bytes)

    def shrink(self, extent: Extent, num_bytes: int) -> Extent:
        """Keep the first `num_bytes` >= 1 of an extent and give the rest back."""
        assert 1 <= num_bytes <= extent.num_bytes
        kept = Extent(extent.offset_bytes, num_bytes)
        rest = extent.occupied_bytes - kept.occupied_bytes
        self._taken[extent.offset_bytes] = kept
        if rest:
            self._holes.give(extent.offset_bytes + kept.occupied_bytes, rest)
        return kept

    def view(self, extent: Extent) -> Bytes:
        """The bytes of an extent, uint8 [num_bytes], not copied."""
        return self.region[extent.offset_bytes : extent.offset_bytes + extent.num_bytes]

    def holes(self) -> Holes:
        """A copy of the free space, in which one may try out what freeing some extents would allow."""
        return self._holes.copy()

    def extents(self) -> list[Extent]:
        """All that is allocated, by offset."""
        return [self._taken[offset] for offset in sorted(self._taken)]

    def check(self) -> None:
        """Assert that holes and extents tile the capacity."""
        self._holes.check()
        ranges = [*self._holes.ranges(), *((e.offset_bytes, e.occupied_bytes) for e in self._taken.values())]
        end = 0
        for start, size in sorted(ranges):
            assert start == end, f"{start - end} bytes before {start} are in no extent and no hole, or in two"
            end = start + size
        assert end == self.capacity_bytes
