"""What goes into a store and what comes out of it: plain values, without sockets, messages or clocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.arena import Extent
from kvstore.codecs import Bytes, Codec
from kvstore.pages import PageLayout
from kvstore.stored import StoredPage


@dataclass(frozen=True, slots=True)
class Lent:
    """The answer to a match."""

    lease_id: str
    """Empty if no page was found."""
    expires_s: float
    pages: tuple[StoredPage, ...]
    """In the order asked, holes left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedPage:
    """A page that somebody else has."""

    key: bytes
    parent: bytes | None
    """None for the first page of a prompt."""
    offset_bytes: int
    """In the region of whoever offers it."""
    num_bytes: int
    lineage: str
    digests: tuple[int, ...]
    """One per kv head."""


@dataclass(frozen=True, slots=True)
class PlannedPull:
    """Pull these pages into these extents, then report `pull_settled`."""

    write_id: int
    pages: tuple[OfferedPage, ...]
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class OfferPlan:
    """What becomes of the pages of an offer: each key is in one of the three."""

    known: tuple[bytes, ...]
    refused: tuple[bytes, ...]
    pull: PlannedPull | None


@dataclass(frozen=True, slots=True)
class DigestExtents:
    """Compute `bytes_digest` of each of these, then report `digested`."""

    write_id: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """The end of a planned pull, as far as whoever offered is concerned."""

    write_id: int
    stored: tuple[bytes, ...]
    refused: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encode this page in the background, then report `encoded`. It is pinned until then."""

    encoding_id: int
    page: Bytes
    """Its bytes in the arena; nobody writes to them meanwhile."""
    layout: PageLayout
    codec: Codec
