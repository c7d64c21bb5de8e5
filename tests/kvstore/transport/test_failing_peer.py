"""Peers that freeze, wake, close and die amid pulls, mostly over TCP: there a read needs the peer's progress thread."""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.transport import CANCELLED, CLOSED, EXPIRED, PageTransport
from kvstore.transport.nixl import NixlTransport
from kvstore.transport.tcp_bytes import open_files
from tests.kvstore.transport.conftest import World
from tests.kvstore.transport.peers import PAGE_BYTES, REGION_BYTES, InProcessPeer, ProcessPeer, PullingProcess, Reader


def process(peer: ProcessPeer | InProcessPeer) -> ProcessPeer:
    assert isinstance(peer, ProcessPeer)
    return peer


def connected(world: World, peer: ProcessPeer) -> Reader:
    reader = world.reader()
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None
    return reader


def test_a_pull_from_a_frozen_peer_expires_and_settles_once_the_peer_goes_on(tcp_world: World) -> None:
    peer = process(tcp_world.shared_peer())
    reader = connected(tcp_world, peer)
    peer.freeze()
    pull_id = reader.submit(peer.card, [0], [0], [REGION_BYTES], deadline_in_s=0.2)
    reader.wait_expired(pull_id)
    assert not reader.has_settled(pull_id)
    peer.wake()
    assert reader.settled(pull_id).error == EXPIRED
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None


def test_a_cancelled_pull_from_a_frozen_peer_settles_only_once_the_peer_goes_on(tcp_world: World) -> None:
    peer = process(tcp_world.shared_peer())
    reader = connected(tcp_world, peer)
    peer.freeze()
    pull_id = reader.submit(peer.card, [0], [0], [REGION_BYTES])
    after = reader.submit(peer.card, [0], [0], [PAGE_BYTES], deadline_in_s=0.1)
    reader.wait_expired(after)  # so the first pieces of both are posted
    reader.thread.cancel(pull_id)
    later = reader.submit(peer.card, [0], [0], [PAGE_BYTES], deadline_in_s=0.1)
    reader.wait_expired(later)
    assert not reader.has_settled(pull_id)
    peer.wake()
    settled = reader.settled(pull_id)
    assert settled.error == CANCELLED
    assert 0 < settled.num_bytes < REGION_BYTES
    assert [reader.settled(other).error for other in (after, later)] == [EXPIRED] * 2


def test_a_frozen_peer_that_is_killed_settles_its_pulls(tcp_world: World) -> None:
    peer = process(tcp_world.peer())
    reader = connected(tcp_world, peer)
    peer.freeze()
    pull_id = reader.submit(peer.card, [0], [0], [REGION_BYTES], deadline_in_s=0.1)
    reader.wait_expired(pull_id)
    peer.kill()
    assert reader.settled(pull_id).error == EXPIRED


def test_a_frozen_peer_does_not_hold_up_pulls_from_another(tcp_world: World) -> None:
    frozen, other = process(tcp_world.shared_peer()), tcp_world.shared_peer(1)
    reader = connected(tcp_world, frozen)
    frozen.freeze()
    stuck = [reader.submit(frozen.card, [0], [0], [REGION_BYTES]) for _ in range(3)]
    assert reader.pull(other.card, [0], [0], [REGION_BYTES]).error is None
    assert not any(reader.has_settled(pull_id) for pull_id in stuck)
    frozen.wake()
    assert [reader.settled(pull_id).error for pull_id in stuck] == [None] * 3


def test_a_peer_that_is_frozen_while_we_connect_keeps_no_page_and_is_pulled_from_later(tcp_world: World) -> None:
    """Nothing was posted yet, so the pull settles with its deadline: its pages need no quarantine."""
    peer, other = process(tcp_world.shared_peer()), tcp_world.shared_peer(1)
    reader = tcp_world.reader()
    peer.freeze()
    pull_id = reader.submit(peer.card, [0], [0], [PAGE_BYTES], deadline_in_s=0.2)
    assert reader.settled(pull_id).error == EXPIRED
    assert reader.pull(other.card, [0], [0], [PAGE_BYTES]).error is None
    peer.wake()
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None


def test_nothing_lands_after_a_frozen_peer_was_forgotten(tcp_world: World) -> None:
    peer = process(tcp_world.peer())
    reader = connected(tcp_world, peer)
    peer.freeze()
    pull_id = reader.submit(peer.card, [0], [0], [REGION_BYTES])
    other = tcp_world.shared_peer(1)
    assert reader.pull(other.card, [0], [0], [PAGE_BYTES]).error is None  # by now the first pieces are posted
    reader.thread.forget(peer.card.incarnation)
    settled = reader.settled(pull_id)
    assert settled.error is not None
    assert "forgotten" in settled.error
    reader.region[:] = 9
    peer.wake()
    assert peer.serves()
    assert (reader.region == 9).all()


def test_closing_ends_pulls_from_a_frozen_peer_by_force(tcp_world: World) -> None:
    reader, peer = tcp_world.reader(close_s=0.1), process(tcp_world.peer())
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None
    peer.freeze()
    pull_id = reader.submit(peer.card, [0], [0], [REGION_BYTES])
    late = reader.submit(peer.card, [0], [0], [REGION_BYTES], deadline_in_s=0.01)
    reader.wait_expired(late)
    reader.thread.close()
    assert reader.settled(pull_id).error == CLOSED
    assert reader.settled(late).error == EXPIRED


def test_closing_does_not_wait_for_a_frozen_peer_that_we_were_connecting_to(tcp_world: World) -> None:
    reader, peer = tcp_world.reader(), process(tcp_world.peer())
    peer.freeze()
    pull_id = reader.submit(peer.card, [0], [0], [PAGE_BYTES])
    reader.thread.close()
    assert reader.settled(pull_id).error == CLOSED


@pytest.mark.parametrize("frozen", [False, True])
def test_a_source_outlives_a_reader_that_is_killed_amid_its_pulls(frozen: bool, tcp_world: World) -> None:
    """UCX aborts a process that has a second message to send to a reader that is gone (see `Link.segment_bytes`).

    With several reads in flight, as any user of the library would post them, a source that was behind (here: frozen)
    as its reader died went with it most of the time.
    """
    peer = process(tcp_world.shared_peer(2))
    pulling = PullingProcess(peer.card)
    if frozen:
        peer.freeze()
    pulling.kill()
    peer.wake()
    assert peer.serves()
    assert tcp_world.reader().pull(peer.card, [0], [0], [PAGE_BYTES]).error is None


def test_a_source_that_closes_amid_pulls_ends_in_good_order(tcp_world: World) -> None:
    peer = process(tcp_world.peer())
    pulling = PullingProcess(peer.card)
    peer.close()
    pulling.kill()


def test_running_out_of_file_descriptors_while_connecting_fails_that_pull_alone(
    tcp_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper thread's OSError used to come out of `advance`, and the transport thread ended with it for good."""
    reader, peer, other = tcp_world.reader(), tcp_world.shared_peer(), tcp_world.shared_peer(1)
    assert reader.pull(other.card, [0], [0], [PAGE_BYTES]).error is None
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.transport.nixl_connection.open_files", _too_many_files)
        error = reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error
    assert error is not None
    assert "Too many open files" in error
    for card in (other.card, peer.card):
        assert reader.pull(card, [0], [0], [PAGE_BYTES]).error is None
    assert reader.failure is None


def test_a_pull_for_which_no_helper_thread_starts_fails_alone(
    tcp_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, peer = tcp_world.reader(), tcp_world.shared_peer()
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.transport.nixl_connection.Connection.start", _no_thread)
        error = reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error
    assert error is not None
    assert "can't start new thread" in error
    assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None


def test_connections_that_were_not_used_for_long_are_closed_as_others_are_made(
    tcp_world: World, make_reader: Callable[[Callable[[npt.NDArray[np.uint8]], PageTransport]], Reader]
) -> None:
    """Each costs 6 MB and 11 file descriptors, and those to earlier processes of the peers used to stay for ever."""
    peers = [tcp_world.shared_peer(number) for number in range(3)]
    reader = make_reader(lambda region: NixlTransport(region, "forgetful", idle_s=0.0))
    num_files = []
    for peer in [*peers, *peers]:
        assert reader.pull(peer.card, [0], [0], [PAGE_BYTES]).error is None
        num_files.append(len(open_files()))
    assert max(num_files) < num_files[0] + 10


def _too_many_files() -> set[int]:
    raise OSError(errno.EMFILE, "Too many open files")


def _no_thread(connection: object, name: str) -> None:
    raise RuntimeError("can't start new thread")
