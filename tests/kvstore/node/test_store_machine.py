"""Any order of offers, late bytes, leases, evictions and encodings: never a wrong byte, never a leaked extent."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvstore.arena import Arena
from kvstore.node.decisions import DigestExtents, Encoding, PlannedPull
from kvstore.node.store import Store, StoreBounds
from kvstore.pages import bytes_digest
from kvstore.stored import StoredPage, restore
from tests.kvstore.node.samples import LAYOUT, WITH_LOSSY, digests_of, key_of, offered, page_of

NUMBERS = range(1, 9)
NUMBER_OF = {key_of(number): number for number in NUMBERS}
SIZES = {number: 2048 if number % 4 == 0 else 4096 for number in NUMBERS}
numbers = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True)
rarely = st.sampled_from([False, False, False, True])
lineages = st.sampled_from(["raw", "raw", "rounded"])


class StoreMachine(RuleBasedStateMachine):
    """The model: which keys are here, and what every lease was promised. A page's true bytes follow from its number."""

    pulls = Bundle("pulls")
    digestings = Bundle("digestings")
    leases = Bundle("leases")
    encodings = Bundle("encodings")

    @initialize(capacity=st.integers(4, 14), writing=st.sampled_from([0.3, 1.0]))
    def start(self, capacity, writing):
        bounds = StoreBounds(max_lease_s=8.0, max_writing_share=writing)
        self.store = Store(Arena(np.zeros(capacity * 2048, np.uint8)), "life-1", bounds, codecs=WITH_LOSSY)
        self.now_s = 0.0
        self.here: set[bytes] = set()
        self.lineages: dict[bytes, str] = {}
        self.lineage_of_write: dict[int, str] = {}
        self.promised: dict[str, tuple[float, tuple[StoredPage, ...]]] = {}
        self.abandoned: set[int] = set()
        self.unfinished: set[int] = set()
        self.encoding_ids: set[int] = set()

    # -- offers ----------------------------------------------------------------------------------------------------

    @rule(numbers=numbers, lineage=lineages)
    def pages_are_offered_and_stored(self, numbers, lineage):
        pull = self.plan(numbers, lineage, patience_s=6, chained=True)
        if pull is not None:
            self.land(pull, set())
            digesting = self.store.pull_settled(pull.write_id, None, ())
            assert isinstance(digesting, DigestExtents)
            self.digests_are_ready(digesting)

    @rule(target=pulls, numbers=numbers, lineage=lineages, patience_s=st.integers(1, 6), chained=st.booleans())
    def offer(self, numbers, lineage, patience_s, chained):
        return self.plan(numbers, lineage, patience_s, chained) or multiple()

    def plan(self, numbers, lineage, patience_s, chained) -> PlannedPull | None:
        pages = [
            offered(number, parent=number - 1 if chained else None, lineage=lineage, page_bytes=SIZES[number])
            for number in numbers
        ]
        before = set(self.here)
        plan = self.store.offer(pages, LAYOUT, self.now_s + patience_s, self.now_s)
        pulled = () if plan.pull is None else plan.pull.pages
        answered = [*plan.known, *plan.refused, *(page.key for page in pulled)]
        assert sorted(answered) == sorted(page.key for page in pages)
        assert set(plan.known) <= before
        if plan.pull is not None:
            self.unfinished.add(plan.pull.write_id)
            self.lineage_of_write[plan.pull.write_id] = lineage
        return plan.pull

    @rule(pull=pulls, garbage=st.booleans())
    def bytes_land(self, pull: PlannedPull, garbage):
        if pull.write_id in self.unfinished:
            self.land(pull, {0} if garbage else set())

    @rule(target=digestings, pull=consumes(pulls), torn=st.sets(st.integers(0, 3), max_size=2), fails=rarely)
    def pull_settles(self, pull: PlannedPull, torn, fails):
        self.land(pull, torn)
        mismatched = tuple(
            place
            for place, (page, extent) in enumerate(zip(pull.pages, pull.extents, strict=True))
            if digests_of(self.store.arena.view(extent)) != page.digests
        )
        error = "the peer is gone" if fails else None
        outcome = self.store.pull_settled(pull.write_id, error, () if fails else mismatched)
        if isinstance(outcome, DigestExtents):
            return outcome
        assert outcome.stored == ()
        self.unfinished.remove(pull.write_id)
        return multiple()

    @rule(digesting=consumes(digestings))
    def digests_are_ready(self, digesting: DigestExtents):
        digests = [bytes_digest(self.store.arena.view(extent)) for extent in digesting.extents]
        written = self.store.digested(digesting.write_id, digests)
        assert (written.stored == ()) == (digesting.write_id in self.abandoned)
        self.lineages.update(dict.fromkeys(written.stored, self.lineage_of_write[digesting.write_id]))
        self.unfinished.remove(digesting.write_id)

    @rule(data=st.data())
    def whoever_offered_gives_up(self, data):
        waiting = sorted(self.unfinished - self.abandoned)
        if waiting:
            write_id = data.draw(st.sampled_from(waiting))
            self.store.abandon(write_id)
            self.abandoned.add(write_id)

    # -- leases ----------------------------------------------------------------------------------------------------

    @rule(target=leases, numbers=numbers, lease_s=st.integers(1, 12))
    def match(self, numbers, lease_s):
        keys = [key_of(number) for number in numbers]
        lent = self.store.match(keys, lease_s, self.now_s)
        assert [page.key for page in lent.pages] == [key for key in keys if key in self.here]
        assert [page.lineage for page in lent.pages] == [self.lineages[page.key] for page in lent.pages]
        if not lent.pages:
            return multiple()
        assert lent.expires_s == self.now_s + min(lease_s, 8)
        self.promised[lent.lease_id] = (lent.expires_s, lent.pages)
        return lent.lease_id

    @rule(lease_id=leases)
    def release(self, lease_id):
        alive = self.promised.pop(lease_id, None) is not None
        assert self.store.release(lease_id, self.now_s) == alive

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.promised = {key: value for key, value in self.promised.items() if value[0] > self.now_s}
        for written in self.store.expire(self.now_s):
            assert written.stored == ()
            self.abandoned.add(written.write_id)
        upcoming_s = self.store.next_deadline_s()
        assert upcoming_s is None or upcoming_s > self.now_s

    # -- write-behind ----------------------------------------------------------------------------------------------

    @rule(target=encodings)
    def encoding_begins(self):
        encoding = self.store.next_encoding()
        if encoding is None:
            return multiple()
        self.encoding_ids.add(encoding.encoding_id)
        return encoding

    @rule(encoding=consumes(encodings), fails=rarely)
    def encoding_ends(self, encoding: Encoding, fails):
        self.encoding_ids.remove(encoding.encoding_id)
        if fails:
            assert not self.store.encoded(encoding.encoding_id, None, 0)
            return
        stored = np.frombuffer(encoding.codec.encode(encoding.page, encoding.layout), np.uint8)
        self.store.encoded(encoding.encoding_id, stored, bytes_digest(stored))

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def the_store_is_consistent(self):
        if not hasattr(self, "store"):
            return
        self.store.check()
        added, removed = self.store.drain_changes()
        assert not self.here & set(added)
        assert set(removed) <= self.here
        self.here = (self.here | set(added)) - set(removed)
        assert self.store.num_pages == len(self.here)

    @invariant()
    def every_lease_reads_what_it_was_promised(self):
        if not hasattr(self, "store"):
            return
        for _, pages in self.promised.values():
            for page in pages:
                assert np.array_equal(self.read(page), page_of(NUMBER_OF[page.key], page.lineage, self.size(page)))

    def teardown(self):
        """Whatever was going on ends; then only the pages of the index may occupy anything."""
        if not hasattr(self, "store"):
            return
        for write_id in sorted(self.unfinished - self.abandoned):
            self.store.abandon(write_id)
        for write_id in sorted(self.unfinished):
            outcome = self.store.pull_settled(write_id, "closed", ())
            assert outcome.stored == ()
        for encoding_id in sorted(self.encoding_ids):
            self.store.encoded(encoding_id, None, 0)
        self.store.expire(self.now_s + 1000)
        self.store.check()
        assert len(self.store.arena.extents()) == self.store.num_pages
        assert self.store.num_quarantined == 0

    # -- helpers ---------------------------------------------------------------------------------------------------

    def land(self, pull: PlannedPull, torn: set[int]) -> None:
        for place, (page, extent) in enumerate(zip(pull.pages, pull.extents, strict=True)):
            view = self.store.arena.view(extent)
            view[:] = page_of(NUMBER_OF[page.key], page.lineage, page.num_bytes)
            if place in torn:
                view[::3] ^= 0x5A

    @staticmethod
    def size(page: StoredPage) -> int:
        return SIZES[NUMBER_OF[page.key]]

    def read(self, stored: StoredPage) -> np.ndarray:
        page = np.empty(self.size(stored), np.uint8)
        staged = self.store.arena.region[stored.offset_bytes : stored.offset_bytes + stored.num_bytes]
        assert restore(stored, staged, page, LAYOUT, WITH_LOSSY)
        return page


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
