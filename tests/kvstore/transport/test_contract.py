"""What every page transport does, over memcpy, over NIXL as it comes (CMA where permitted), and over NIXL on TCP."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvstore.transport import CANCELLED, CLOSED, EXPIRED, Card, Way
from tests.kvstore.transport.conftest import World
from tests.kvstore.transport.peers import PAGE_BYTES, REGION_BYTES, ProcessPeer, digests, pull_until_error

PATHS = {"inprocess": {"inprocess"}, "nixl": {"nixl:cma", "nixl:tcp"}, "nixl-tcp": {"nixl:tcp"}}
NUM_PAGES = REGION_BYTES // PAGE_BYTES


def test_a_card_survives_the_wire(world: World) -> None:
    card = world.shared_peer().card
    assert Card.from_proto(card.to_proto()) == card


def test_one_page_lands_where_it_was_asked_to_and_nowhere_else(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    settled = reader.pull(peer.card, [3 * PAGE_BYTES], [5 * PAGE_BYTES], [PAGE_BYTES])
    assert settled.error is None
    assert settled.mismatched == ()
    assert settled.num_bytes == PAGE_BYTES
    assert settled.path in PATHS[world.kind]
    wanted = np.ones_like(reader.region)
    wanted[5 * PAGE_BYTES : 6 * PAGE_BYTES] = peer.content[3 * PAGE_BYTES : 4 * PAGE_BYTES]
    assert np.array_equal(reader.region, wanted)


def test_nothing_is_pulled_by_no_extents_and_by_empty_ones(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    assert reader.pull(peer.card, [], [], []).error is None
    settled = reader.pull(peer.card, [0, REGION_BYTES], [7, REGION_BYTES], [0, 0])
    assert (settled.error, settled.num_bytes) == (None, 0)
    assert (reader.region == 1).all()


def test_hundreds_of_scattered_pages_land_each_in_its_place(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    rng = np.random.default_rng(0)
    remote, local = (rng.permutation(NUM_PAGES)[:300] * PAGE_BYTES for _ in range(2))
    settled = reader.pull(peer.card, remote.tolist(), local.tolist(), [PAGE_BYTES] * 300)
    assert (settled.error, settled.num_bytes) == (None, 300 * PAGE_BYTES)
    for source, target in zip(remote, local, strict=True):
        assert np.array_equal(reader.region[target : target + PAGE_BYTES], peer.content[source : source + PAGE_BYTES])


def test_extents_of_odd_sizes_at_odd_offsets_mix_with_empty_ones(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    assert reader.pull(peer.card, [1, 77, 1000, 5], [3, 100_001, 9, 50_000], [4, 0, 333, 12_345]).error is None
    wanted = np.ones_like(reader.region)
    for remote, local, size in ((1, 3, 4), (1000, 9, 333), (5, 50_000, 12_345)):
        wanted[local : local + size] = peer.content[remote : remote + size]
    assert np.array_equal(reader.region, wanted)


def test_a_run_of_many_pieces_lands_whole(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    whole = REGION_BYTES - 5
    settled = reader.pull(peer.card, [2], [5], [whole])
    assert (settled.error, settled.num_bytes) == (None, whole)
    assert np.array_equal(reader.region[5:], peer.content[2 : 2 + whole])


def test_digests_that_differ_are_named_and_the_others_are_not(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    offsets = [0, 9 * PAGE_BYTES, 4 * PAGE_BYTES]
    expected = digests(peer.content, offsets, PAGE_BYTES, heads=3)
    local = [0, PAGE_BYTES, 2 * PAGE_BYTES]
    good = reader.submit(peer.card, offsets, local, [PAGE_BYTES] * 3, expected=expected)
    assert reader.settled(good).mismatched == ()
    expected[1, 2] ^= np.uint64(1)
    bad = reader.submit(peer.card, offsets, local, [PAGE_BYTES] * 3, expected=expected)
    assert reader.settled(bad).error is None
    assert reader.settled(bad).mismatched == (1,)


def test_a_head_count_that_does_not_divide_a_page_is_a_mismatch(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    expected = np.zeros((1, 7), dtype=np.uint64)
    assert reader.settled(reader.submit(peer.card, [0], [0], [PAGE_BYTES], expected=expected)).mismatched == (0,)


@pytest.mark.parametrize(
    ("remote", "local", "size", "side"),
    [
        (REGION_BYTES - 1, 0, 2, "remote"),
        (REGION_BYTES + 1, 0, 0, "remote"),
        (-1, 0, 1, "remote"),
        (np.iinfo(np.int64).max, 0, np.iinfo(np.int64).max, "remote"),
        (0, REGION_BYTES - 1, 2, "local"),
        (0, -8, 8, "local"),
        (0, 0, -1, "remote"),
    ],
)
def test_an_extent_outside_a_region_is_refused_before_any_byte_moves(
    world: World, remote: int, local: int, size: int, side: str
) -> None:
    reader, peer = world.reader(), world.shared_peer()
    settled = reader.pull(peer.card, [0, remote], [0, local], [PAGE_BYTES, size])
    assert settled.error is not None
    assert f"extent 1 leaves the {side} region" in settled.error
    assert settled.num_bytes == 0
    assert (reader.region == 1).all()


def test_a_card_that_promises_more_than_there_is_fails_alone(world: World) -> None:
    """A peer's word is not enough: what lies beyond its region is not read, and its good extents stay readable."""
    reader, peer = world.reader(), world.shared_peer()
    boast = dataclasses.replace(peer.card, region_bytes=REGION_BYTES * 4)
    assert reader.pull(boast, [REGION_BYTES * 2], [0], [PAGE_BYTES]).error is not None
    assert (reader.region == 1).all()
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None


def test_a_card_without_a_way_that_we_know_is_refused(world: World) -> None:
    reader = world.reader()
    card = Card(incarnation="x", region_bytes=REGION_BYTES, ways=(Way("pigeon", b"loft 3"),))
    error = reader.pull(card, [0], [0], [1]).error
    assert error is not None
    assert "cannot be reached" in error


@pytest.mark.parametrize(
    "blob", [b"", b"nonsense", b"{}\nxyz", b'{"base": 1, "host": "h", "segment_bytes": 9}\nnonsense']
)
def test_a_way_that_is_nonsense_is_an_error_and_the_next_pull_works(world: World, blob: bytes) -> None:
    reader, peer = world.reader(), world.shared_peer()
    ways = tuple(Way(way.kind, blob) for way in peer.card.ways)
    card = Card(incarnation="nonsense", region_bytes=REGION_BYTES, ways=ways)
    assert reader.pull(card, [0], [0], [1]).error is not None
    assert reader.pull(peer.card, [0], [0], [1]).error is None


def test_a_pull_whose_deadline_has_passed_moves_nothing(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    late = reader.submit(peer.card, [0], [0], [PAGE_BYTES], deadline_in_s=-1)
    assert reader.settled(late).error == EXPIRED
    assert (reader.region == 1).all()


def test_a_cancelled_pull_settles_as_cancelled_or_was_done_before(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    pulls = [reader.submit(peer.card, [0], [0], [REGION_BYTES]) for _ in range(6)]
    for pull_id in pulls:
        reader.thread.cancel(pull_id)
    reader.thread.cancel(12345)
    outcomes = [reader.settled(pull_id) for pull_id in pulls]
    assert {settled.error for settled in outcomes} <= {None, CANCELLED}
    assert outcomes[-1].error == CANCELLED
    assert outcomes[-1].num_bytes < REGION_BYTES


def test_a_peer_that_died_before_the_pull_is_an_error(world: World) -> None:
    reader, peer = world.reader(), world.peer()
    peer.kill()
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is not None
    assert (reader.region == 1).all()


def test_a_peer_that_died_between_two_pulls_is_an_error(world: World) -> None:
    reader, peer = world.reader(), world.peer()
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None
    peer.kill()
    assert pull_until_error(reader, peer.card)


def test_every_pull_from_a_peer_that_dies_meanwhile_settles(world: World) -> None:
    reader, peer = world.reader(), world.peer()
    pulls = [reader.submit(peer.card, [0], [0], [REGION_BYTES]) for _ in range(12)]
    assert reader.settled(pulls[0]).error is None
    peer.kill()
    for pull_id in pulls:
        settled = reader.settled(pull_id)
        assert settled.error is None or settled.num_bytes < REGION_BYTES


def test_a_peer_that_closed_is_an_error_and_so_is_its_old_card_after_a_restart(world: World) -> None:
    reader, old = world.reader(), world.peer()
    assert reader.pull(old.card, [0], [0], [PAGE_BYTES]).error is None
    old.close()
    assert pull_until_error(reader, old.card)
    new = world.peer()
    assert new.card.incarnation != old.card.incarnation
    assert reader.pull(new.card, [0], [0], [PAGE_BYTES]).error is None
    assert np.array_equal(reader.region[:PAGE_BYTES], new.content[:PAGE_BYTES])
    assert reader.pull(old.card, [0], [0], [PAGE_BYTES]).error is not None


def test_a_dead_peer_does_not_touch_pulls_from_another(world: World) -> None:
    reader, dead, alive = world.reader(), world.peer(), world.shared_peer()
    assert reader.pull(dead.card, [0], [0], [PAGE_BYTES]).error is None
    pulls = [reader.submit(alive.card, [0], [0], [REGION_BYTES]) for _ in range(3)]
    dead.kill()
    failing = [reader.submit(dead.card, [0], [0], [REGION_BYTES]) for _ in range(3)]
    pulls += [reader.submit(alive.card, [0], [0], [REGION_BYTES]) for _ in range(3)]
    assert [reader.settled(pull_id).error for pull_id in pulls] == [None] * 6
    assert all(reader.settled(pull_id).error is not None for pull_id in failing)


def test_a_forgotten_peer_can_be_pulled_from_again(world: World) -> None:
    """Forgetting is about the connection, not a ban: the caller may have been wrong about the peer."""
    reader, peer = world.reader(), world.shared_peer()
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None
    reader.thread.forget(peer.card.incarnation)
    reader.thread.forget("never heard of")
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None


def test_closing_settles_what_is_under_way_and_what_comes_later(world: World) -> None:
    reader, peer = world.reader(), world.shared_peer()
    pulls = [reader.submit(peer.card, [0], [0], [REGION_BYTES]) for _ in range(8)]
    reader.thread.close()
    pulls.append(reader.submit(peer.card, [0], [0], [PAGE_BYTES]))
    assert {reader.settled(pull_id).error for pull_id in pulls} <= {None, CLOSED}
    assert reader.settled(pulls[-1]).error == CLOSED
    reader.thread.close()


def test_two_processes_pull_from_each_other(world: World) -> None:
    """Pages move both ways between a prefill and a decode worker, by the same two agents."""
    one, other = world.reader(), world.reader()
    other.region[:PAGE_BYTES] = 7
    assert one.pull(other.card, [0], [PAGE_BYTES], [PAGE_BYTES]).error is None
    assert other.pull(one.card, [PAGE_BYTES], [2 * PAGE_BYTES], [PAGE_BYTES]).error is None
    assert (other.region[2 * PAGE_BYTES : 3 * PAGE_BYTES] == 7).all()


def test_a_peer_still_serves_after_a_reader_closed_amid_its_pulls(world: World) -> None:
    reader, other, peer = world.reader(close_s=0.0), world.reader(), world.shared_peer()
    for _ in range(6):
        reader.submit(peer.card, [0], [0], [REGION_BYTES])
    assert other.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None
    reader.thread.close()
    assert other.pull(peer.card, [0], [0], [REGION_BYTES]).error is None
    assert not isinstance(peer, ProcessPeer) or peer.serves()
