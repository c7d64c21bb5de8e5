"""A store, event by event: what it takes, lends, gives up and re-encodes."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.arena import GRANULE_BYTES, Arena
from kvstore.node.decisions import DigestExtents, Encoding, Lent, OfferedPage, OfferPlan, PlannedPull, Written
from kvstore.node.store import Store, StoreBounds
from kvstore.pages import bytes_digest
from kvstore.stored import StoredPage, restore
from tests.kvstore.node.samples import LAYOUT, PAGE_BYTES, WITH_LOSSY, key_of, offered, page_of


class Node:
    """A store, and in its transport's place a test that lands the bytes."""

    def __init__(self, num_pages: int = 8, *, write_behind: bool = True, **bounds) -> None:
        arena = Arena(np.zeros(num_pages * PAGE_BYTES, np.uint8))
        wide = StoreBounds(**{"max_writing_share": 1.0, **bounds})
        self.store = Store(arena, "life-1", wide, write_behind=write_behind, codecs=WITH_LOSSY)

    def offer(self, *pages: OfferedPage, deadline_s: float = 10.0, now_s: float = 0.0) -> OfferPlan:
        return self.store.offer(pages, LAYOUT, deadline_s, now_s)

    def land(self, pull: PlannedPull, lineage: str = "raw") -> None:
        for number in range(64):
            for page, extent in zip(pull.pages, pull.extents, strict=True):
                if page.key == key_of(number):
                    self.store.arena.view(extent)[:] = page_of(number, lineage, page.num_bytes)

    def finish(self, pull: PlannedPull, lineage: str = "raw") -> Written:
        self.land(pull, lineage)
        settled = self.store.pull_settled(pull.write_id, None, ())
        assert isinstance(settled, DigestExtents)
        return self.digest(settled)

    def digest(self, settled: DigestExtents) -> Written:
        digests = [bytes_digest(self.store.arena.view(extent)) for extent in settled.extents]
        return self.store.digested(settled.write_id, digests)

    def put(self, *numbers: int, parent: int | None = None, now_s: float = 0.0) -> None:
        plan = self.offer(*(offered(number, parent=parent) for number in numbers), now_s=now_s)
        assert plan.pull is not None
        assert len(self.finish(plan.pull).stored) == len(numbers)

    def match(self, *numbers: int, lease_s: float = 5.0, now_s: float = 0.0) -> Lent:
        return self.store.match([key_of(number) for number in numbers], lease_s, now_s)

    def has(self, *numbers: int, now_s: float = 0.0) -> list[int]:
        """Which of these are here; what is found becomes the most recently used."""
        lent = self.match(*numbers, now_s=now_s)
        self.store.release(lent.lease_id, now_s)
        return [number for number in numbers if key_of(number) in {page.key for page in lent.pages}]

    def read(self, stored: StoredPage) -> np.ndarray | None:
        page = np.empty(PAGE_BYTES, np.uint8)
        start = stored.offset_bytes
        staged = self.store.arena.region[start : start + stored.num_bytes]
        return page if restore(stored, staged, page, LAYOUT, WITH_LOSSY) else None

    def encode_next(self) -> bool:
        encoding = self.store.next_encoding()
        assert encoding is not None
        return self.finish_encoding(encoding)

    def finish_encoding(self, encoding: Encoding) -> bool:
        stored = np.frombuffer(encoding.codec.encode(encoding.page, encoding.layout), np.uint8)
        return self.store.encoded(encoding.encoding_id, stored, bytes_digest(stored))


@pytest.fixture
def node():
    node = Node()
    yield node
    node.store.check()


def test_a_page_is_found_once_its_pull_has_settled_and_its_digest_is_known(node):
    plan = node.offer(offered(1))
    assert (plan.known, plan.refused) == ((), ())
    assert node.has(1) == []
    node.land(plan.pull)
    settled = node.store.pull_settled(plan.pull.write_id, None, ())
    assert node.has(1) == []
    assert node.digest(settled) == Written(plan.pull.write_id, (key_of(1),), ())
    lent = node.match(1)
    assert np.array_equal(node.read(lent.pages[0]), page_of(1))


def test_a_missing_page_leaves_a_hole_and_pages_behind_it_are_found(node):
    node.put(1)
    node.put(3, parent=2)
    lent = node.match(1, 2, 3)
    assert [page.key for page in lent.pages] == [key_of(1), key_of(3)]


def test_a_match_of_nothing_is_no_lease(node):
    assert node.match(1, 2).lease_id == ""
    assert node.store.release("", 0.0) is False


def test_a_page_that_is_here_is_known_and_not_pulled_again(node):
    node.put(1)
    plan = node.offer(offered(1), offered(2))
    assert plan.known == (key_of(1),)
    assert [page.key for page in plan.pull.pages] == [key_of(2)]


def test_a_page_that_another_offer_is_bringing_is_refused(node):
    first = node.offer(offered(1))
    second = node.offer(offered(1))
    assert (second.refused, second.pull) == ((key_of(1),), None)
    node.finish(first.pull)
    assert node.has(1) == [1]


def test_a_failed_pull_gives_its_room_back(node):
    plan = node.offer(offered(1), offered(2))
    written = node.store.pull_settled(plan.pull.write_id, "the peer is gone", ())
    assert written == Written(plan.pull.write_id, (), (key_of(2), key_of(1)))
    assert node.store.stored_bytes == 0
    assert node.has(1, 2) == []


def test_a_page_whose_digest_differs_is_refused_and_its_neighbours_count(node):
    plan = node.offer(offered(1), offered(2), offered(4))
    node.land(plan.pull)
    written = node.digest(node.store.pull_settled(plan.pull.write_id, None, (1,)))
    assert written == Written(plan.pull.write_id, (key_of(1), key_of(4)), (key_of(2),))
    assert node.has(1, 2, 4) == [1, 4]
    assert np.array_equal(node.read(node.match(4).pages[0]), page_of(4))


def test_an_expired_pull_keeps_its_extents_until_it_has_settled(node):
    plan = node.offer(offered(1), offered(2), deadline_s=10.0)
    assert node.store.next_deadline_s() == 10.0
    assert node.store.expire(9.0) == []
    assert node.store.expire(10.0) == [Written(plan.pull.write_id, (), (key_of(1), key_of(2)))]
    assert node.store.num_quarantined == 2
    assert node.store.next_deadline_s() is None
    again = node.offer(offered(1), now_s=11.0)
    assert not set(again.pull.extents) & set(plan.pull.extents)
    node.land(plan.pull)  # the bytes that nothing could stop
    node.finish(again.pull)
    assert np.array_equal(node.read(node.match(1, now_s=12.0).pages[0]), page_of(1))
    assert node.store.pull_settled(plan.pull.write_id, None, ()) == Written(
        plan.pull.write_id, (), (key_of(1), key_of(2))
    )
    assert node.store.num_quarantined == 0
    assert node.has(2) == []


def test_a_write_abandoned_while_its_digests_are_computed_does_not_count(node):
    plan = node.offer(offered(1))
    node.land(plan.pull)
    settled = node.store.pull_settled(plan.pull.write_id, None, ())
    node.store.abandon(plan.pull.write_id)
    assert node.digest(settled).stored == ()
    assert node.store.stored_bytes == 0


def test_pulls_that_never_settle_take_no_more_than_their_share():
    node = Node(num_pages=8, max_writing_share=0.25)
    plan = node.offer(offered(1), offered(2), offered(4))
    assert plan.refused == (key_of(4),)
    node.store.expire(100.0)
    assert node.offer(offered(5), deadline_s=200.0, now_s=100.0).refused == (key_of(5),)
    node.store.pull_settled(plan.pull.write_id, "stopped", ())
    assert node.offer(offered(5), deadline_s=200.0, now_s=100.0).refused == ()
    node.store.check()


def test_leases_end_by_themselves(node):
    node.put(1)
    lent = node.match(1, lease_s=5.0, now_s=1.0)
    assert lent.expires_s == 6.0
    assert node.store.next_deadline_s() == 6.0
    node.store.expire(6.0)
    assert node.store.release(lent.lease_id, 6.0) is False


def test_a_release_after_the_lease_is_over_is_told_so_even_if_nobody_looked_meanwhile(node):
    node.put(1)
    lent = node.match(1, lease_s=5.0)
    assert node.store.release(lent.lease_id, 5.0) is False


def test_a_lease_is_released_once(node):
    node.put(1)
    lent = node.match(1)
    assert node.store.release(lent.lease_id, 1.0) is True
    assert node.store.release(lent.lease_id, 1.0) is False


def test_a_reader_gets_no_longer_lease_than_the_node_allows():
    node = Node(max_lease_s=2.0)
    node.put(1)
    assert node.match(1, lease_s=1000.0).expires_s == 2.0
    assert node.match(1, lease_s=1.0).expires_s == 1.0


def test_the_least_recently_used_leaf_goes_first():
    node = Node(num_pages=4, write_behind=False)
    node.put(1)
    node.put(2, parent=1)
    node.put(4, parent=1)
    node.put(5)
    node.has(2)
    node.put(7)
    assert node.has(1, 2, 4, 5, 7) == [1, 2, 5, 7]
    node.store.check()


def test_a_leased_page_is_never_evicted():
    node = Node(num_pages=2, write_behind=False)
    node.put(1, 2)
    lent = node.match(1, lease_s=100.0)
    node.put(4)
    node.put(5)
    assert np.array_equal(node.read(lent.pages[0]), page_of(1))
    assert node.has(1, 2, 4, 5) == [1, 5]
    node.store.check()


def test_nothing_is_evicted_for_a_page_that_does_not_fit_even_so():
    node = Node(num_pages=4, write_behind=False)
    node.put(1, 2, 4, 5)
    node.match(2, lease_s=100.0)
    assert node.offer(offered(7, page_bytes=3 * PAGE_BYTES)).refused == (key_of(7),)
    assert node.offer(offered(7, page_bytes=5 * PAGE_BYTES)).refused == (key_of(7),)
    assert node.has(1, 2, 4, 5) == [1, 2, 4, 5]
    node.store.check()


def test_an_offer_evicts_as_much_as_it_needs():
    node = Node(num_pages=8, write_behind=False)
    node.put(1, 2, 3, 4, 5, 6, 7, 8)
    node.put(9, 10, 11)
    assert node.store.num_evicted == 3
    assert node.has(*range(1, 12)) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_nothing_is_evicted_for_pages_that_may_not_be_taken():
    node = Node(num_pages=8, write_behind=False, max_writing_share=0.25)
    for number in range(1, 9):
        node.put(number)
    assert node.offer(*map(offered, range(9, 13))).refused == (key_of(11), key_of(12))
    assert node.store.num_evicted == 2


def test_a_known_page_is_not_evicted_for_its_companions():
    node = Node(num_pages=2, write_behind=False)
    node.put(1, 2)
    plan = node.offer(offered(1), offered(4))
    node.finish(plan.pull)
    assert node.has(1, 2, 4) == [1, 4]


def test_the_index_tells_what_entered_and_left_it():
    node = Node(num_pages=2, write_behind=False)
    node.put(1, 2)
    added, removed = node.store.drain_changes()
    assert (sorted(added), removed) == (sorted([key_of(1), key_of(2)]), [])
    node.put(4)
    assert node.store.drain_changes() == ([key_of(4)], [key_of(1)])
    assert node.store.drain_changes() == ([], [])


def test_a_raw_page_becomes_a_smaller_one_and_gives_its_room_back(node):
    node.put(1)
    before = node.store.stored_bytes
    assert node.encode_next()
    assert node.store.stored_bytes < before
    stored = node.match(1).pages[0]
    assert (stored.codec, stored.lineage) == ("lossless", "raw")
    assert stored.num_bytes < PAGE_BYTES
    assert np.array_equal(node.read(stored), page_of(1))
    assert node.store.next_encoding() is None


def test_a_page_that_does_not_shrink_stays_raw(node):
    node.put(3)
    assert not node.encode_next()
    assert node.match(3).pages[0].codec == "raw"
    assert node.store.next_encoding() is None


def test_a_page_whose_encoding_failed_stays_raw(node):
    node.put(1)
    encoding = node.store.next_encoding()
    assert not node.store.encoded(encoding.encoding_id, None, 0)
    assert node.has(1) == [1]


def test_a_reader_keeps_the_raw_bytes_while_the_page_is_encoded(node):
    node.put(1)
    before = node.match(1, lease_s=10.0)
    assert node.encode_next()
    node.put(2, 4)
    assert np.array_equal(node.read(before.pages[0]), page_of(1))
    after = node.match(1)
    assert after.pages[0].codec == "lossless"
    both = node.store.stored_bytes
    node.store.release(before.lease_id, 1.0)
    assert both - node.store.stored_bytes == PAGE_BYTES


def test_a_page_that_is_being_encoded_is_not_evicted():
    node = Node(num_pages=1)
    node.put(1)
    encoding = node.store.next_encoding()
    assert node.offer(offered(2)).refused == (key_of(2),)
    assert node.finish_encoding(encoding)
    node.put(2)
    assert node.has(1, 2) == [2]
    node.store.check()


def test_in_a_full_arena_a_page_is_encoded_where_it_lies():
    node = Node(num_pages=2)
    node.put(1, 2)
    before = node.match(1).pages[0]
    node.store.expire(100.0)
    assert node.encode_next()
    after = node.match(1, now_s=100.0).pages[0]
    assert (after.codec, after.offset_bytes) == ("lossless", before.offset_bytes)
    assert np.array_equal(node.read(after), page_of(1))
    assert node.has(2, now_s=100.0) == [2]
    node.store.check()


def test_in_a_full_arena_a_leased_page_stays_raw():
    node = Node(num_pages=1)
    node.put(1)
    lent = node.match(1)
    assert not node.encode_next()
    assert np.array_equal(node.read(lent.pages[0]), page_of(1))
    assert node.match(1).pages[0].codec == "raw"
    node.store.check()


def test_an_evicted_page_is_not_encoded():
    node = Node(num_pages=2)
    node.put(1, 2)
    node.put(4, 5)
    assert node.encode_next()
    assert node.has(4, 5) == [4, 5]
    node.store.check()


def test_without_write_behind_pages_stay_raw():
    node = Node(write_behind=False)
    node.put(1)
    assert node.store.next_encoding() is None


def test_a_better_lineage_replaces_a_worse_one_and_not_the_other_way_round(node):
    node.finish(node.offer(offered(1, lineage="rounded")).pull, "rounded")
    lossy = node.match(1)
    assert (lossy.pages[0].codec, lossy.pages[0].lineage) == ("raw", "rounded")
    node.finish(node.offer(offered(1)).pull)
    exact = node.match(1)
    assert exact.pages[0].lineage == "raw"
    assert np.array_equal(node.read(exact.pages[0]), page_of(1))
    assert np.array_equal(node.read(lossy.pages[0]), page_of(1, "rounded"))
    assert node.offer(offered(1, lineage="rounded")).known == (key_of(1),)
    assert node.store.num_pages == 1


def test_a_page_replaced_while_it_is_encoded_keeps_the_better_bytes(node):
    node.finish(node.offer(offered(1, lineage="rounded")).pull, "rounded")
    encoding = node.store.next_encoding()
    node.finish(node.offer(offered(1)).pull)
    assert node.finish_encoding(encoding) is False
    assert np.array_equal(node.read(node.match(1).pages[0]), page_of(1))
    assert node.encode_next()


def test_re_encoded_pages_close_up(node):
    """Without best fit and joined holes, the room that encoding wins would lie about in pieces too small for a page."""
    node.put(1, 2, 4, 5, 7, 8)
    for _ in range(6):
        assert node.encode_next()
    free = node.store.arena.free_bytes
    assert node.store.arena.holes().largest_bytes >= free - PAGE_BYTES
    assert free >= 3 * PAGE_BYTES


def test_capacity_is_whole_granules():
    arena = Arena(np.zeros(10 * GRANULE_BYTES + 1, np.uint8))
    assert arena.capacity_bytes == 10 * GRANULE_BYTES
