"""Extents: never overlapping, never lost, and whole again when all are back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvstore.arena import GRANULE_BYTES, Arena, Extent

CAPACITY = 64 * GRANULE_BYTES


@pytest.fixture
def arena():
    arena = Arena(np.zeros(CAPACITY + 100, np.uint8))
    yield arena
    arena.check()


def test_an_empty_arena_can_be_taken_whole(arena):
    extent = arena.allocate(CAPACITY)
    assert extent == Extent(0, CAPACITY)
    assert arena.allocate(1) is None
    arena.free(extent)
    assert arena.free_bytes == CAPACITY


def test_more_than_the_capacity_is_never_given(arena):
    assert arena.allocate(CAPACITY + 1) is None


def test_an_arena_smaller_than_a_granule_holds_nothing():
    arena = Arena(np.zeros(GRANULE_BYTES - 1, np.uint8))
    assert arena.capacity_bytes == 0
    assert arena.allocate(1) is None
    arena.check()


def test_the_smallest_hole_that_fits_is_taken(arena):
    extents = [arena.allocate(granules * GRANULE_BYTES) for granules in (4, 1, 2, 1, 56)]
    arena.free(extents[0])
    arena.free(extents[2])
    assert arena.allocate(2 * GRANULE_BYTES) == extents[2]
    assert arena.allocate(3 * GRANULE_BYTES) == Extent(0, 3 * GRANULE_BYTES)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_neighbours_become_one_hole(arena, order):
    extents = [arena.allocate(CAPACITY // 4) for _ in range(4)]
    for index in order:
        arena.free(extents[index])
    assert arena.allocate(3 * CAPACITY // 4) == Extent(0, 3 * CAPACITY // 4)


def test_freeing_twice_or_what_was_never_given_raises(arena):
    extent = arena.allocate(700)
    arena.free(extent)
    with pytest.raises(KeyError):
        arena.free(extent)
    arena.allocate(700)
    with pytest.raises(KeyError):
        arena.free(Extent(0, 699))


def test_a_view_is_the_region_itself(arena):
    arena.allocate(10)
    extent = arena.allocate(10)
    arena.view(extent)[:] = 7
    assert arena.region[GRANULE_BYTES : GRANULE_BYTES + 10].tolist() == [7] * 10
    assert arena.region.sum() == 70


class ArenaMachine(RuleBasedStateMachine):
    """The model is a list of granules, each free or named after its extent."""

    extents = Bundle("extents")

    @initialize()
    def start(self) -> None:
        self.arena = Arena(np.zeros(CAPACITY, np.uint8))
        self.granules: list[int | None] = [None] * 64

    @rule(target=extents, num_bytes=st.integers(1, 12 * GRANULE_BYTES))
    def allocate(self, num_bytes):
        extent = self.arena.allocate(num_bytes)
        needed = -(-num_bytes // GRANULE_BYTES)
        if extent is None:
            assert needed > self.longest_run()
            return None
        first = extent.offset_bytes // GRANULE_BYTES
        assert self.granules[first : first + needed] == [None] * needed
        self.granules[first : first + needed] = [extent.offset_bytes] * needed
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent):
        if extent is None:
            return
        self.arena.free(extent)
        self.granules = [None if owner == extent.offset_bytes else owner for owner in self.granules]

    @rule(target=extents, extent=consumes(extents), num_bytes=st.integers(1, 12 * GRANULE_BYTES))
    def shrink(self, extent, num_bytes):
        if extent is None:
            return None
        kept = self.arena.shrink(extent, min(num_bytes, extent.num_bytes))
        first, last = kept.offset_bytes // GRANULE_BYTES, extent.occupied_bytes // GRANULE_BYTES
        for place in range(first + kept.occupied_bytes // GRANULE_BYTES, first + last):
            self.granules[place] = None
        return kept

    @rule(extent=extents)
    def trying_out_changes_nothing(self, extent):
        before = self.arena.free_bytes
        trial = self.arena.holes()
        if extent is not None and extent in self.arena.extents():
            trial.give(extent.offset_bytes, extent.occupied_bytes)
            trial.check()
        trial.take(GRANULE_BYTES)
        assert self.arena.free_bytes == before

    def longest_run(self) -> int:
        marks = "".join("." if owner is None else "x" for owner in self.granules)
        return max(len(run) for run in marks.split("x"))

    @invariant()
    def arena_and_model_agree(self):
        if hasattr(self, "arena"):
            self.arena.check()
            assert self.arena.free_bytes == self.granules.count(None) * GRANULE_BYTES
            assert self.arena.holes().largest_bytes == self.longest_run() * GRANULE_BYTES


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
