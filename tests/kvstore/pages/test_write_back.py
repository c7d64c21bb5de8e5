"""What becomes of pages that were offered."""

from __future__ import annotations

from kvstore.pages import OfferSettled, StorageChanged, WriteBack, WriteBackConfig, page_keys
from tests.kvstore.pages.test_cache import fill, make_cache


def test_refused_pages_count_as_evicted_unsaved_unless_a_request_took_them_meanwhile():
    """They used to be dropped like pages that had found an owner."""
    cache = make_cache(4)
    keys = page_keys(b"n", list(range(8)), 2)
    for page in fill(cache, keys):
        cache.release(page)
    write_back = WriteBack(cache, WriteBackConfig(free_share=0.75, offer_pages=8))
    write_back.handle(StorageChanged(1))
    [offer] = write_back.due(4)
    assert len(offer.pages) == 3
    write_back.handle(OfferSettled(offer.offer_id, num_refused=2))
    assert (cache.evicted_unsaved, cache.num_cached) == (2, 1)
    cache.check()

    write_back = WriteBack(cache, WriteBackConfig(free_share=0.99, offer_pages=8))
    write_back.handle(StorageChanged(1))
    for page in fill(cache, page_keys(b"m", list(range(6)), 2)):
        cache.release(page)
    [offer] = write_back.due(4)
    [taken] = cache.take([offer.pages[0].key])
    write_back.handle(OfferSettled(offer.offer_id, num_refused=len(offer.pages)))
    assert cache.evicted_unsaved == 2 + len(offer.pages) - 1
    cache.release(taken)
    cache.check()
