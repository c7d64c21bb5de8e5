"""Readers, offerers and transports that are late, gone or wrong: what a node does, and what a client does about it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from kvstore.client import KvClientConfig
from kvstore.stored import layout_to_proto
from protos import kvstore_pb2, kvstore_pb2_grpc
from protos.serving import connect
from tests.kvstore.node.harness import BareNode, Cluster, eventually, run
from tests.kvstore.node.samples import LAYOUT, PAGE_BYTES, digests_of, key_of, page_of
from tests.kvstore.transport.faults import Fault

FIRST, SECOND = 1, 2  # a node numbers its pulls from 1 on


def settled(node: BareNode) -> bool:
    return node.store.num_quarantined == 0 and len(node.store.arena.extents()) == node.store.num_pages


def test_a_late_answer_is_a_miss_and_its_lease_is_given_back():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker(KvClientConfig(silence_s=0.0))
            await worker.offer(1, 2)
            node.gate.open.clear()
            assert await worker.match(2, deadline_in_s=0.1) == []
            assert node.store.num_evictable == 0
            node.gate.open.set()
            await eventually(lambda: node.gate.num_released == 1)
            assert node.store.num_evictable == 2
            assert await worker.fetch(2) == [1, 2]

    run(body)


def test_a_silent_node_is_not_asked_again_for_a_while_and_an_answer_ends_that():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker(KvClientConfig(silence_s=1000.0))
            await worker.offer(1, 2)
            node.gate.open.clear()
            assert await worker.match(2, deadline_in_s=0.05) == []
            asked = node.gate.num_asked
            assert await worker.match(2) == []
            assert (await worker.offer(3)).refused == {key_of(3)}
            assert node.gate.num_asked == asked
            node.gate.open.set()
            await eventually(lambda: node.gate.num_released == 1)
            assert await worker.fetch(2) == [1, 2]

    run(body)


def test_one_silent_node_does_not_hold_up_the_others():
    async def body() -> None:
        async with Cluster() as cluster:
            silent, node = await cluster.bare_node(), await cluster.bare_node()
            worker = await cluster.worker()
            await worker.offer(*range(1, 33))
            silent.gate.open.clear()
            matches = await worker.match(32, deadline_in_s=0.2)
            assert [match.node_id for match in matches] == [node.node_id]
            silent.gate.open.set()

    run(body)


def test_a_match_that_is_cancelled_gives_every_lease_back():
    async def body() -> None:
        async with Cluster() as cluster:
            nodes = [await cluster.bare_node(), await cluster.bare_node()]
            worker = await cluster.worker()
            await worker.offer(*range(1, 33))
            nodes[0].gate.open.clear()
            match = asyncio.create_task(worker.match(32))
            await eventually(lambda: all(node.gate.num_asked == 1 for node in nodes))
            match.cancel()
            with pytest.raises(asyncio.CancelledError):
                await match
            nodes[0].gate.open.set()
            await eventually(lambda: all(node.gate.num_released == 1 for node in nodes))

    run(body)


def test_a_node_that_leaves_the_view_during_a_match_is_a_miss():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker(KvClientConfig(release_deadline_s=0.05))
            await worker.offer(1)
            node.gate.open.clear()
            match = asyncio.create_task(worker.match(1))
            await eventually(lambda: node.gate.num_asked == 1)
            cluster.left(node.node_id)
            assert await match == []
            node.gate.open.set()

    run(body)


def test_a_client_that_is_closed_hangs_up_on_everything():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker()
            await worker.offer(1)
            node.gate.open.clear()
            assert await worker.match(1, deadline_in_s=0.05) == []
            await worker.client.close()
            await worker.client.close()
            assert await worker.match(1) == []
            node.gate.open.set()

    run(body)


def test_nobody_is_asked_once_the_deadline_has_passed():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker()
            assert (await worker.offer(1, deadline_in_s=-1.0)).refused == {key_of(1)}
            assert await worker.match(1, deadline_in_s=-1.0) == []
            assert node.gate.num_asked == 0
            await worker.offer(1)
            assert await worker.fetch(1) == [1]

    run(body)


def test_an_offerer_that_is_gone_leaves_nothing_behind():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker()
            worker.transport.close()
            assert (await worker.offer(1, 2)).refused == {key_of(1), key_of(2)}
            assert node.store.stored_bytes == 0

    run(body)


def test_an_offer_past_its_deadline_is_discarded_and_its_room_free_once_the_pull_has_settled():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker(KvClientConfig(silence_s=0.0))
            node.faults.plan(FIRST, Fault(hold_end=True))
            assert (await worker.offer(1, 2, deadline_in_s=0.2)).refused == {key_of(1), key_of(2)}
            await eventually(lambda: node.store.num_quarantined == 2)
            assert node.store.stored_bytes == 2 * PAGE_BYTES
            assert (await worker.offer(1)).stored == {key_of(1)}
            node.faults.release(FIRST)
            await eventually(lambda: settled(node))
            assert await worker.fetch(2) == [1]

    run(body)


def test_an_offer_whose_caller_goes_away_is_abandoned():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker()
            node.faults.plan(FIRST, Fault(hold_end=True))
            offer = asyncio.create_task(worker.offer(1, 2))
            await eventually(lambda: node.faults.landed(FIRST).is_set())
            offer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await offer
            await eventually(lambda: node.store.num_quarantined == 2)
            node.faults.release(FIRST)
            await eventually(lambda: settled(node))
            assert await worker.match(2) == []

    run(body)


def test_damaged_bytes_are_refused_and_the_rest_is_stored():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker()
            node.faults.plan(FIRST, Fault(corrupt=True))
            outcome = await worker.offer(1, 2, 3)
            assert outcome.refused == {key_of(1)}
            assert outcome.stored == {key_of(2), key_of(3)}
            assert node.published == outcome.stored
            assert (await worker.offer(1)).stored == {key_of(1)}

    run(body)


def test_a_page_that_is_not_what_its_digests_say_is_refused():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker()
            outcome = await worker.offer(1, digests=digests_of(page_of(2)))
            assert outcome.refused == {key_of(1)}
            assert node.store.stored_bytes == 0

    run(body)


def test_a_failed_pull_is_refused():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker()
            node.faults.plan(FIRST, Fault(error="the link is down"))
            assert (await worker.offer(1)).refused == {key_of(1)}
            assert settled(node)

    run(body)


def test_two_offers_of_one_page_store_it_once():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            first, second = await cluster.worker(), await cluster.worker()
            node.faults.plan(FIRST, Fault(hold_start=True))
            slow = asyncio.create_task(first.offer(1))
            await eventually(lambda: node.store.stored_bytes > 0)
            assert (await second.offer(1, 2)).refused == {key_of(1)}
            node.faults.release(FIRST)
            assert (await slow).stored == {key_of(1)}
            assert await second.fetch(2) == [1, 2]
            assert node.store.num_stored == 2

    run(body)


def test_a_node_that_closes_during_an_offer_answers_and_leaks_nothing():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker()
            node.faults.plan(FIRST, Fault(hold_end=True))
            offer = asyncio.create_task(worker.offer(1, 2))
            await eventually(lambda: node.faults.landed(FIRST).is_set())
            await node.stop()
            assert (await offer).refused == {key_of(1), key_of(2)}
            await eventually(lambda: node.store.stored_bytes == 0)

    run(body)


def page(**changes) -> kvstore_pb2.OfferedPage:
    fields = {
        "key": key_of(1),
        "parent_key": b"",
        "offset_bytes": 0,
        "num_bytes": PAGE_BYTES,
        "lineage": kvstore_pb2.CODEC_RAW,
        "digests": digests_of(page_of(1)),
    }
    return kvstore_pb2.OfferedPage(**{**fields, **changes})


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        ([page(key=b"short")], "5 bytes"),
        ([page(), page()], "twice"),
        ([page(parent_key=b"x")], "parent"),
        ([page(parent_key=key_of(1))], "parent of itself"),
        ([page(num_bytes=0)], "0 bytes"),
        ([page(num_bytes=PAGE_BYTES + 1)], "not 4096"),
        ([page(digests=[])], "0 digests"),
        ([page(digests=[1] * 3)], "3 digests"),
        ([page(), page(key=key_of(2), digests=[1])], "1 digests"),
        ([page(lineage=0)], "lineage"),
        ([page(lineage=77)], "77"),
        ([page(offset_bytes=(1 << 64) - 1)], "leave a region"),
        ([page(offset_bytes=1 << 20)], "leave a region"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused_as_a_whole(pages, reason):
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            worker = await cluster.worker()
            async with connect(node.address) as channel:
                stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
                request = kvstore_pb2.OfferRequest(
                    card=worker.card.to_proto(), pages=pages, layout=layout_to_proto(LAYOUT)
                )
                with pytest.raises(grpc.aio.AioRpcError, match=reason) as raised:
                    await stub.Offer(request, timeout=10)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert node.store.stored_bytes == 0

    run(body)


def test_other_requests_that_make_no_sense_are_refused():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            async with connect(node.address) as channel:
                stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
                for call in (
                    stub.Match(kvstore_pb2.MatchRequest(keys=[key_of(1)], lease_ms=0), timeout=10),
                    stub.Match(kvstore_pb2.MatchRequest(keys=[b"short"], lease_ms=5), timeout=10),
                    stub.Match(kvstore_pb2.MatchRequest(keys=[key_of(1)] * 2, lease_ms=5), timeout=10),
                    stub.Offer(kvstore_pb2.OfferRequest(), timeout=10),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await call
                    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                released = await stub.Release(kvstore_pb2.ReleaseRequest(lease_id="never given"), timeout=10)
                assert not released.released
                empty = await stub.Match(kvstore_pb2.MatchRequest(lease_ms=5), timeout=10)
                assert (empty.lease_id, len(empty.pages)) == ("", 0)
                nothing = await stub.Offer(kvstore_pb2.OfferRequest(layout=layout_to_proto(LAYOUT)), timeout=10)
                assert [*nothing.stored, *nothing.known, *nothing.refused] == []

    run(body)
