import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.pages import (
    InvalidTransition,
    Ledger,
    OutOfPages,
    Owner,
    PageCache,
    PageLayout,
    PinKind,
    allocate_region,
    page_keys,
)

LAYOUT = PageLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2, dtype="float32")


def make_cache(num_pages: int = 4) -> PageCache:
    return PageCache(LAYOUT, allocate_region(num_pages * LAYOUT.page_bytes), num_pages)


def fill(cache: PageCache, keys: list[bytes]) -> list[int]:
    """Pages of one request, published in order."""
    pages = cache.reserve(len(keys))
    for index, page in enumerate(pages):
        cache.ledger.begin_fill(page)
        cache.ledger.complete(page)
        assert cache.publish(page, keys, index)
    return pages


def test_pages_come_in_runs_and_go_back():
    ledger = Ledger(6)
    first, second = ledger.reserve(3), ledger.reserve(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    for page in first:
        ledger.retire(page)
    assert ledger.reserve(3) == [0, 1, 2]
    with pytest.raises(OutOfPages) as error:
        ledger.reserve(2)
    assert (error.value.needed, error.value.room) == (2, 1)
    ledger.check()


def test_a_page_whose_pull_has_not_settled_is_quarantined_until_it_has():
    ledger = Ledger(1)
    (page,) = ledger.reserve(1)
    ledger.begin_fill(page)
    ledger.pin(page, PinKind.LANDING)
    with pytest.raises(InvalidTransition):
        ledger.complete(page)
    ledger.retire(page)
    assert (ledger.owner(page), ledger.pages_free) == (Owner.QUARANTINED, 0)
    ledger.unpin(page, PinKind.LANDING)
    assert (ledger.owner(page), ledger.pages_free) == (Owner.FREE, 1)
    ledger.check()


def test_an_impossible_transition_tells_the_page_its_pins_and_its_history():
    ledger = Ledger(1)
    ledger.reserve(1)
    with pytest.raises(InvalidTransition, match=r"publish: page 0 is reserved, pins \{\}, after \['reserve'\]"):
        ledger.publish(0)


def test_a_second_request_takes_what_the_first_one_published():
    cache = make_cache()
    keys = page_keys(b"n", [1, 2, 3, 4], 2)
    pages = fill(cache, keys)
    assert cache.take([*keys, b"other"]) == [*pages, None]
    for page in pages:
        cache.release(page)
    assert cache.pages_free == 2
    for page in pages:
        cache.release(page)
    assert cache.pages_free == 4
    assert cache.matched(keys) == pages
    cache.check()


def test_a_duplicate_stays_with_its_request():
    cache = make_cache()
    (key,) = page_keys(b"n", [1, 2], 2)
    (first,) = fill(cache, [key])
    (second,) = cache.reserve(1)
    cache.ledger.begin_fill(second)
    cache.ledger.complete(second)
    assert not cache.publish(second, [key], 0)
    cache.release(second)
    cache.release(first)
    assert cache.matched([key]) == [first]
    assert cache.ledger.num_free == 3
    cache.check()


def test_eviction_takes_leaves_before_parents_and_the_coldest_first():
    cache = make_cache(4)
    old = page_keys(b"n", [1, 2, 3, 4], 2)
    new = page_keys(b"n", [5, 6], 2)
    for keys in (old, new):
        for page in fill(cache, keys):
            cache.release(page)
    assert [entry.key for entry in cache.reclaim(target_free=3, limit=8)] == [old[1], old[0]]
    cache.check()


def test_pages_on_their_way_out_can_still_be_taken_and_then_stay():
    cache = make_cache(2)
    keys = page_keys(b"n", [1, 2, 3, 4], 2)
    for page in fill(cache, keys):
        cache.release(page)
    cold = cache.reclaim(target_free=2, limit=8)
    assert cache.pages_free == 0
    assert cache.reclaim(target_free=2, limit=8) == []
    (page, *_) = cache.take(keys[:1])
    cache.written_out(cold)
    assert cache.matched(keys) == [page, None]
    assert cache.ledger.num_free == 1
    cache.check()


def test_reserving_evicts_and_counts_what_was_never_offered():
    cache = make_cache(2)
    for page in fill(cache, page_keys(b"n", [1, 2, 3, 4], 2)):
        cache.release(page)
    assert len(cache.reserve(2)) == 2
    assert cache.evicted_unsaved == 2
    with pytest.raises(OutOfPages):
        cache.reserve(1)
    cache.check()


def test_changes_that_cancel_out_are_not_reported():
    cache = make_cache(2)
    keys = page_keys(b"n", [1, 2], 2)
    for page in fill(cache, keys):
        cache.release(page)
    cache.evict_all()
    assert cache.drain_changes() == ([], [])
    for page in fill(cache, keys):
        cache.release(page)
    assert cache.drain_changes() == (keys, [])
    cache.evict_all()
    assert cache.drain_changes() == ([], keys)


class CacheMachine(RuleBasedStateMachine):
    """Requests that take, fill, lend, abandon and finish in any order: pages are conserved and never owned twice."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(8)
        self.requests: list[dict] = []
        self.writing: list = []
        self.landing: list[int] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8))
    def begin(self, tokens: list[int]) -> None:
        keys = page_keys(b"n", tokens, 2)
        pages = self.cache.take(keys)
        missing = [index for index, page in enumerate(pages) if page is None]
        try:
            reserved = self.cache.reserve(len(missing))
        except OutOfPages:
            for page in pages:
                if page is not None:
                    self.cache.release(page)
            return
        for index, page in zip(missing, reserved, strict=True):
            pages[index] = page
        self.requests.append({"keys": keys, "pages": pages, "missing": missing})

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fill_one(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not request["missing"]:
            return
        index = request["missing"].pop(0)
        page = request["pages"][index]
        self.cache.ledger.begin_fill(page)
        self.cache.ledger.complete(page)
        self.cache.publish(page, request["keys"], index)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), late=st.booleans())
    def finish(self, data: st.DataObject, late: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        for index, page in enumerate(request["pages"]):
            if late and index in request["missing"]:
                self.cache.ledger.begin_fill(page)
                self.cache.ledger.pin(page, PinKind.LANDING)
                self.landing.append(page)
            self.cache.release(page)

    @precondition(lambda self: self.landing)
    @rule()
    def settle(self) -> None:
        self.cache.ledger.unpin(self.landing.pop(0), PinKind.LANDING)

    @rule(target_free=st.integers(0, 8))
    def reclaim(self, target_free: int) -> None:
        self.writing.append(self.cache.reclaim(target_free, 3))

    @precondition(lambda self: self.writing)
    @rule()
    def written_out(self) -> None:
        self.cache.written_out(self.writing.pop(0))

    @invariant()
    def holds(self) -> None:
        self.cache.check()

    def teardown(self) -> None:
        while self.landing:
            self.settle()
        while self.writing:
            self.written_out()
        for request in self.requests:
            for page in request["pages"]:
                self.cache.release(page)
        self.cache.check()
        assert self.cache.pages_free == 8


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_region_is_writable_and_zero():
    region = allocate_region(10_000)
    assert region.dtype == np.uint8
    assert not region.any()
    region[-1] = 1


def test_a_cold_page_names_the_first_page_of_its_fragment():
    """Fragments are 128 tokens deep: 64 pages here."""
    cache = make_cache(70)
    keys = page_keys(b"n", list(range(140)), 2)
    for page in fill(cache, keys):
        cache.release(page)
    cold = {entry.key: entry for entry in cache.reclaim(target_free=70, limit=70)}
    assert [cold[key].fragment_key for key in keys] == [keys[0]] * 64 + [keys[64]] * 6
    assert [cold[key].parent for key in keys] == [None, *keys[:-1]]
