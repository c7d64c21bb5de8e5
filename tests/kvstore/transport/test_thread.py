"""The thread's promises, over a transport whose faults are planned."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.pages.digest import page_digests
from kvstore.transport import (
    CANCELLED,
    CLOSED,
    EXPIRED,
    DigestsReady,
    PageTransport,
    Pull,
    PullSettled,
    TransportThread,
    boot_time_s,
    create_transport,
)
from kvstore.transport.inprocess import Fabric
from tests.kvstore.transport.faults import Fault, FaultPlan, FaultyTransport
from tests.kvstore.transport.peers import PAGE_BYTES, REGION_BYTES, WAIT_S, InProcessPeer, Reader, digests

MakeReader = Callable[[Callable[[npt.NDArray[np.uint8]], PageTransport]], Reader]


class Bench:
    """A reader and a peer in one process, with a fault plan between them."""

    def __init__(self, make_reader: MakeReader) -> None:
        fabric = Fabric()
        self.plan = FaultPlan()
        self.peer = InProcessPeer(fabric)
        self.reader = make_reader(
            lambda region: FaultyTransport(create_transport(("inprocess",), region, "reader", fabric=fabric), self.plan)
        )

    def submit(self, pages: int = 1, deadline_in_s: float = WAIT_S) -> int:
        places = [page * PAGE_BYTES for page in range(pages)]
        return self.reader.submit(self.peer.card, places, places, [PAGE_BYTES] * pages, deadline_in_s=deadline_in_s)


@pytest.fixture
def bench(make_reader: MakeReader) -> Bench:
    return Bench(make_reader)


def test_a_pull_that_was_never_posted_settles_at_its_deadline(bench: Bench) -> None:
    bench.plan.plan(1, Fault(hold_start=True))
    pull_id = bench.submit(deadline_in_s=0.05)
    assert bench.reader.settled(pull_id).error == EXPIRED
    assert pull_id in bench.reader.expired
    assert (bench.reader.region == 1).all()


def test_an_expired_pull_is_settled_only_when_nothing_can_land_any_more(bench: Bench) -> None:
    bench.plan.plan(1, Fault(hold_end=True))
    pull_id = bench.submit(deadline_in_s=0.05)
    bench.reader.wait_expired(pull_id)
    assert bench.reader.settled(bench.submit()).error is None
    assert not bench.reader.has_settled(pull_id)
    bench.plan.release(pull_id)
    settled = bench.reader.settled(pull_id)
    assert (settled.error, settled.num_bytes) == (EXPIRED, PAGE_BYTES)


def test_a_cancelled_pull_is_settled_only_when_nothing_can_land_any_more(bench: Bench) -> None:
    bench.plan.plan(1, Fault(hold_end=True))
    pull_id = bench.submit()
    assert bench.plan.landed(pull_id).wait(WAIT_S)
    bench.reader.thread.cancel(pull_id)
    bench.reader.thread.cancel(pull_id)
    assert bench.reader.settled(bench.submit()).error is None
    assert not bench.reader.has_settled(pull_id)
    bench.plan.release(pull_id)
    assert bench.reader.settled(pull_id).error == CANCELLED


def test_a_pull_that_was_cancelled_before_its_deadline_never_expires(bench: Bench) -> None:
    bench.plan.plan(1, Fault(hold_end=True))
    pull_id = bench.submit(deadline_in_s=0.1)
    bench.reader.thread.cancel(pull_id)
    bench.plan.plan(2, Fault(hold_end=True))
    bench.reader.wait_expired(bench.submit(deadline_in_s=0.2))
    assert pull_id not in bench.reader.expired
    bench.plan.release(1)
    bench.plan.release(2)
    assert bench.reader.settled(pull_id).error == CANCELLED


def test_a_pull_that_fails_half_way_says_why_and_checks_no_digests(bench: Bench) -> None:
    bench.plan.plan(1, Fault(error="the cable broke"))
    expected = np.zeros((1, 1), dtype=np.uint64)
    pull_id = bench.reader.submit(bench.peer.card, [0], [0], [PAGE_BYTES], expected=expected)
    settled = bench.reader.settled(pull_id)
    assert (settled.error, settled.mismatched) == ("the cable broke", ())


def test_bytes_that_changed_on_the_way_are_a_mismatch(bench: Bench) -> None:
    bench.plan.plan(1, Fault(corrupt=True))
    offsets = [0, PAGE_BYTES]
    expected = digests(bench.peer.content, offsets, PAGE_BYTES, heads=3)
    pull_id = bench.reader.submit(bench.peer.card, offsets, offsets, [PAGE_BYTES] * 2, expected=expected)
    settled = bench.reader.settled(pull_id)
    assert (settled.error, settled.mismatched) == (None, (0,))


def test_forgetting_a_peer_settles_its_pulls(bench: Bench) -> None:
    bench.plan.plan(1, Fault(hold_end=True))
    bench.plan.plan(2, Fault(hold_start=True))
    pulls = [bench.submit(), bench.submit(pages=2)]
    bench.reader.thread.forget(bench.peer.card.incarnation)
    for pull_id in pulls:
        error = bench.reader.settled(pull_id).error
        assert error is not None
        assert "forgotten" in error


def test_closing_settles_pulls_that_would_never_end(bench: Bench) -> None:
    bench.plan.plan(1, Fault(hold_end=True))
    bench.plan.plan(2, Fault(hold_start=True))
    pulls = [bench.submit(), bench.submit(), bench.submit()]
    assert bench.reader.settled(pulls[2]).error is None
    bench.reader.thread.close()
    assert [bench.reader.settled(pull_id).error for pull_id in pulls[:2]] == [CLOSED, CLOSED]
    assert bench.reader.failure is None


def test_a_transport_that_breaks_its_contract_settles_everything_and_says_so(bench: Bench) -> None:
    bench.plan.plan(1, Fault(hold_end=True))
    bench.plan.plan(2, Fault(crash=True))
    pulls = [bench.submit(), bench.submit()]
    errors = [bench.reader.settled(pull_id).error for pull_id in pulls]
    errors.append(bench.reader.settled(bench.submit()).error)
    assert errors == ["the transport thread failed: a planned crash"] * 3
    assert bench.reader.wait_failed() == errors[0]


def test_an_id_is_taken_until_its_pull_has_settled(bench: Bench) -> None:
    bench.plan.plan(1, Fault(hold_end=True))
    pull_id = bench.submit()
    empty = np.zeros(0, dtype=np.int64)
    again = Pull(
        pull_id=pull_id,
        card=bench.peer.card,
        remote_offsets=empty,
        local_offsets=empty,
        num_bytes=empty,
        deadline_s=boot_time_s() + WAIT_S,
    )
    with pytest.raises(ValueError, match="has not settled yet"):
        bench.reader.thread.submit(again)
    bench.plan.release(pull_id)
    assert bench.reader.settled(pull_id).error is None


def test_pulls_from_many_threads_settle_once_each(bench: Bench) -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    fabric = Fabric()
    peer = InProcessPeer(fabric)
    region = np.ones(REGION_BYTES, dtype=np.uint8)
    transport = TransportThread(lambda: create_transport(("inprocess",), region, "many", fabric=fabric), events=events)
    transport.start()

    def submit(first: int) -> None:
        for pull_id in range(first, first + 50):
            places = np.array([pull_id * 64], dtype=np.int64)
            sizes = np.array([64], dtype=np.int64)
            pull = Pull(
                pull_id=pull_id,
                card=peer.card,
                remote_offsets=places,
                local_offsets=places,
                num_bytes=sizes,
                deadline_s=boot_time_s() + WAIT_S,
            )
            transport.submit(pull)
            if pull_id % 3 == 0:
                transport.cancel(pull_id)

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(0, 400, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transport.close()
    settled = [events.get_nowait() for _ in range(events.qsize())]
    assert all(isinstance(event, PullSettled) for event in settled)
    assert sorted(event.pull_id for event in settled if isinstance(event, PullSettled)) == list(range(400))


def test_a_pull_submitted_before_the_start_is_done_after_it() -> None:
    fabric = Fabric()
    peer = InProcessPeer(fabric)
    region = np.ones(REGION_BYTES, dtype=np.uint8)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    transport = TransportThread(lambda: create_transport(("inprocess",), region, "early", fabric=fabric), events=events)
    one, none = np.array([1], dtype=np.int64), np.zeros(1, dtype=np.int64)
    transport.submit(
        Pull(
            pull_id=1,
            card=peer.card,
            remote_offsets=none,
            local_offsets=none,
            num_bytes=one,
            deadline_s=boot_time_s() + WAIT_S,
        )
    )
    transport.start()
    event = events.get(timeout=WAIT_S)
    assert isinstance(event, PullSettled)
    assert event.error is None
    transport.close()


def test_a_transport_that_cannot_be_made_fails_the_start_and_settles_what_was_asked() -> None:
    def refuse() -> PageTransport:
        raise RuntimeError("no network here")

    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    transport = TransportThread(refuse, events=events)
    with pytest.raises(RuntimeError, match="no network here"):
        transport.start()
    transport.close()


def test_closing_what_was_never_started_is_allowed() -> None:
    transport = TransportThread(lambda: pytest.fail("never made"))
    transport.close()
    transport.close()


def test_digests_of_local_pages_are_computed_on_request(bench: Bench) -> None:
    reader = bench.reader
    pages = 80  # more than one round computes
    reader.region[:] = bench.peer.content
    offsets = np.arange(pages, dtype=np.int64)[::-1] * PAGE_BYTES
    sizes = np.full(pages, PAGE_BYTES, dtype=np.int64)
    reader.thread.digests(offsets, sizes, heads=3, tag="mine")
    event = reader.events.get(timeout=WAIT_S)
    assert isinstance(event, DigestsReady)
    assert event.tag == "mine"
    wanted = page_digests(reader.region[: pages * PAGE_BYTES].reshape(pages, PAGE_BYTES), 3)[::-1]
    assert np.array_equal(event.digests, wanted)


@pytest.mark.parametrize(("offset", "size", "heads"), [(-1, 3, 3), (REGION_BYTES, 3, 3), (0, 4, 3), (0, 3, 0)])
def test_digests_of_nonsense_are_refused_where_they_are_asked(bench: Bench, offset: int, size: int, heads: int) -> None:
    with pytest.raises(ValueError, match=r"region|heads"):
        bench.reader.thread.digests(
            np.array([offset], dtype=np.int64), np.array([size], dtype=np.int64), heads, tag=None
        )
