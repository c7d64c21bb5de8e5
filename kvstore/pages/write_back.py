"""When a worker's cold pages are written out to the storage nodes: on its own clock, before their room is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.pages.cache import ColdPage, PageCache


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteBackConfig:
    """How early and how much at once."""

    free_share: float = 0.125
    """Share of the pool that is kept free (not merely evictable) while there are storage nodes."""
    max_inflight_pages: int = 64
    """Pages offered and not yet answered."""
    offer_pages: int = 16
    """Pages per offer."""

    def __post_init__(self) -> None:
        if not 0 <= self.free_share < 1:
            raise ValueError(f"free_share must be in [0, 1), got {self.free_share}")
        for name in ("max_inflight_pages", "offer_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class OfferPages:
    """Offer these to their owners, then report `OfferSettled`: once nobody can read them any more."""

    offer_id: int
    pages: tuple[ColdPage, ...]


@dataclass(frozen=True, slots=True)
class OfferSettled:
    offer_id: int
    num_refused: int = 0
    """Pages that no storage node took."""


@dataclass(frozen=True, slots=True)
class StorageChanged:
    """There are this many storage nodes now."""

    num_nodes: int


@dataclass(frozen=True, slots=True)
class EvictPrefixes:
    """Write out and drop every page that no request uses."""


class WriteBack:
    """Plain bookkeeping over a `PageCache`; owned by the step loop.

    Without storage nodes it does nothing: pages are then evicted when somebody needs their room.
    """

    def __init__(self, cache: PageCache, config: WriteBackConfig) -> None:
        self._cache = cache
        self._config = config
        self._num_storage_nodes = 0
        self._offers: dict[int, OfferPages] = {}
        self._next_id = 1
        self._emptying = False
        self.pages_offered = 0

    @property
    def has_storage(self) -> bool:
        return self._num_storage_nodes > 0

    @property
    def num_inflight(self) -> int:
        return sum(len(offer.pages) for offer in self._offers.values())

    def handle(self, event: StorageChanged | EvictPrefixes | OfferSettled) -> None:
        match event:
            case StorageChanged():
                self._num_storage_nodes = event.num_nodes
            case EvictPrefixes():
                self._emptying = True
            case OfferSettled():
                num_cached = self._cache.num_cached
                self._cache.written_out(self._offers.pop(event.offer_id).pages)
                # Those that a request took meanwhile are not lost.
                self._cache.evicted_unsaved += min(event.num_refused, num_cached - self._cache.num_cached)

    def due(self, spare_pages: int) -> Sequence[OfferPages]:
        """Offers to send now.

        spare_pages: evictable or free pages that nobody was promised. No more are taken: while a page is on its way out
        it cannot be given to a request whose growth was promised.
        """
        if not self.has_storage:
            if self._emptying:
                self._cache.evict_all()
                self._emptying = False
            return ()
        num_pages = self._cache.ledger.num_pages
        target = num_pages if self._emptying else int(num_pages * self._config.free_share)
        offers: list[OfferPages] = []
        while (room := min(self._config.max_inflight_pages - self.num_inflight, spare_pages)) > 0:
            cold = self._cache.reclaim(target, min(room, self._config.offer_pages))
            if not cold:
                self._emptying = self._emptying and bool(self._offers)
                break
            offer = OfferPages(self._next_id, tuple(cold))
            self._next_id += 1
            self._offers[offer.offer_id] = offer
            self.pages_offered += len(cold)
            spare_pages -= len(cold)
            offers.append(offer)
        return offers
