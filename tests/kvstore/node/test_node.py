"""Storage nodes over gRPC and a real transport, and a worker that writes pages out and reads them back."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.client import KvClientConfig
from kvstore.node import StorageNode, StoreBounds
from kvstore.owners import fragment_key, owner
from kvstore.transport import create_transport
from protos import common_pb2, control_pb2
from protos.serving import connect
from tests.kvstore.node.harness import FRAGMENT_PAGES, WAIT_S, Cluster, eventually, run
from tests.kvstore.node.samples import PAGE_BYTES, key_of, page_of
from tests.kvstore.transport.faults import Fault, FaultPlan, FaultyTransport

NUMBERS = tuple(range(1, 33))


def test_pages_that_were_offered_come_back_byte_for_byte():
    async def body() -> None:
        async with Cluster() as cluster:
            await cluster.node("kv-0")
            worker = await cluster.worker()
            outcome = await worker.offer(*NUMBERS)
            assert outcome.stored == {key_of(number) for number in NUMBERS}
            assert not outcome.known | outcome.refused
            assert await worker.fetch(32) == list(NUMBERS)
            assert (await worker.offer(1, 2)).known == {key_of(1), key_of(2)}

    run(body)


def test_pages_are_compressed_behind_and_still_come_back():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.node("kv-0")
            worker = await cluster.worker()
            await worker.offer(*NUMBERS)
            store = node._keeper.store
            await eventually(lambda: store.num_to_encode == 0)
            assert store.stored_bytes < 0.85 * len(NUMBERS) * PAGE_BYTES
            [match] = await worker.match(32)
            codecs = {number: match.pages[number - 1].codec for number in NUMBERS}
            assert codecs == {number: "lossless" if number % 3 else "raw" for number in NUMBERS}
            await worker.client.release(match)
            assert await worker.fetch(32) == list(NUMBERS)
            store.check()

    run(body)


def test_without_lossless_pages_stay_as_they_are():
    async def body() -> None:
        async with Cluster() as cluster:
            await cluster.node("kv-0", lossless=False)
            worker = await cluster.worker()
            await worker.offer(*NUMBERS)
            [match] = await worker.match(32)
            assert {page.codec for page in match.pages.values()} == {"raw"}

    run(body)


def test_lossy_pages_are_misses_unless_the_reader_says_how_lossy_they_may_be():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.node("kv-0")
            worker = await cluster.worker()
            await worker.offer(2)
            await worker.offer(1, lineage="fp8")
            await worker.offer(3, lineage="nvfp4")
            [exact] = await worker.match(3)
            assert set(exact.pages) == {1}
            [balanced] = await worker.match(3, lossiest="k-fp8-v-nvfp4")
            assert {index: page.lineage for index, page in balanced.pages.items()} == {0: "fp8", 1: "raw"}
            [compact] = await worker.match(3, lossiest="nvfp4")
            assert set(compact.pages) == {0, 1, 2}
            for match in (exact, balanced, compact):
                await worker.client.release(match)
            assert await worker.match(1) == []  # what is of no use is given back
            assert node._keeper.store.num_evictable == 3

    run(body)


def test_a_better_lineage_takes_the_place_of_a_worse_one():
    async def body() -> None:
        async with Cluster() as cluster:
            await cluster.node("kv-0")
            worker = await cluster.worker()
            assert (await worker.offer(1, lineage="nvfp4")).stored == {key_of(1)}
            assert (await worker.offer(1, lineage="fp8")).stored == {key_of(1)}
            assert (await worker.offer(1, lineage="nvfp4")).known == {key_of(1)}
            assert await worker.fetch(1) == []
            assert (await worker.offer(1)).stored == {key_of(1)}
            assert await worker.fetch(1) == [1]

    run(body)


def test_each_fragment_is_with_its_owner_and_a_prompt_comes_from_all_of_them_at_once():
    async def body() -> None:
        async with Cluster() as cluster:
            for node_id in ("kv-0", "kv-1"):
                await cluster.node(node_id)
            worker = await cluster.worker()
            await worker.offer(*NUMBERS)
            keys = [key_of(number) for number in NUMBERS]
            matches = await worker.match(32)
            found = {index: match.node_id for match in matches for index in match.pages}
            weights = dict.fromkeys(cluster.members, 1.0)
            assert found == {i: owner(fragment_key(keys, i, FRAGMENT_PAGES), weights) for i in range(32)}
            assert set(found.values()) == {"kv-0", "kv-1"}
            assert await worker.fetch(32) == list(NUMBERS)

    run(body)


def test_only_wanted_pages_are_asked_for():
    async def body() -> None:
        async with Cluster() as cluster:
            await cluster.node("kv-0")
            worker = await cluster.worker()
            await worker.offer(*NUMBERS)
            [match] = await worker.match(32, wanted=[3, 7])
            assert sorted(match.pages) == [3, 7]
            assert await worker.match(32, wanted=[]) == []

    run(body)


def test_a_node_that_is_gone_leaves_holes_and_no_error():
    async def body() -> None:
        async with Cluster() as cluster:
            nodes = [await cluster.node(node_id) for node_id in ("kv-0", "kv-1")]
            worker = await cluster.worker()
            await worker.offer(*NUMBERS)
            kept = {index for match in await worker.match(32) if match.node_id == "kv-1" for index in match.pages}
            await nodes[0].stop()
            assert await worker.fetch(32) == sorted(index + 1 for index in kept)
            outcome = await worker.offer(*NUMBERS)
            assert outcome.known == {key_of(index + 1) for index in kept}
            assert outcome.refused == {key_of(number) for number in NUMBERS} - outcome.known
            cluster.left("kv-0")
            outcome = await worker.offer(*NUMBERS)
            assert not outcome.refused
            assert await worker.fetch(32) == list(NUMBERS)

    run(body)


def test_a_restarted_node_is_empty_and_knows_no_old_lease():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.node("kv-0")
            worker = await cluster.worker()
            await worker.offer(1, 2)
            [old] = await worker.match(2)
            await node.stop()
            node = await cluster.node("kv-0")
            assert await worker.match(2) == []
            await worker.client.release(old)
            assert await worker.pull(9, old) == []
            await worker.offer(1, 2)
            assert await worker.fetch(2) == [1, 2]

    run(body)


def test_without_nodes_everything_is_a_miss():
    async def body() -> None:
        async with Cluster() as cluster:
            worker = await cluster.worker()
            assert await worker.match(4) == []
            assert (await worker.offer(1)).refused == {key_of(1)}

    run(body)


def test_an_old_view_is_ignored():
    async def body() -> None:
        async with Cluster() as cluster:
            worker = await cluster.worker()
            before = cluster.view()
            await cluster.node("kv-0")
            assert worker.client.update(before) == []
            assert (await worker.offer(1)).stored == {key_of(1)}

    run(body)


def test_an_update_names_the_incarnations_that_are_gone():
    async def body() -> None:
        async with Cluster() as cluster:
            worker = await cluster.worker()
            member = control_pb2.StorageMember(node_id="kv-0", incarnation="first", address="127.0.0.1:1", weight=1.0)
            moved, restarted = control_pb2.StorageMember(), control_pb2.StorageMember()
            moved.CopyFrom(member)
            moved.address = "127.0.0.1:2"
            restarted.CopyFrom(member)
            restarted.incarnation = "second"
            views = [[member], [member], [moved], [restarted], []]
            gone = [
                worker.client.update(control_pb2.StorageView(membership_epoch=epoch, members=members))
                for epoch, members in enumerate(views, 1)
            ]
            assert gone == [[], [], [], ["first"], ["second"]]

    run(body)


def test_the_control_plane_hears_of_the_node_its_load_and_its_keys():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.node("kv-0", num_pages=8, lossless=False)
            control = cluster.control
            worker = await cluster.worker()
            await eventually(lambda: bool(control.nodes))
            assert (control.nodes[0].node_id, control.nodes[0].role) == ("kv-0", common_pb2.ROLE_KV)
            assert (control.nodes[0].address, control.nodes[0].incarnation) == (node.address, node.incarnation)
            await worker.offer(1, 2)
            await eventually(lambda: control.keys == {key_of(1), key_of(2)})
            [match] = await worker.match(2)
            await eventually(lambda: bool(control.loads) and control.loads[-1].pages_served == 2)
            load = control.loads[-1]
            assert (load.pages_cached, load.pages_pulled, load.bytes_pulled) == (2, 2, 2 * PAGE_BYTES)
            assert (load.stored_bytes, load.capacity_bytes) == (2 * PAGE_BYTES, 8 * PAGE_BYTES)
            assert (load.pages_total, load.pages_free, load.pages_quarantined) == (8, 6, 0)
            assert (load.transport, load.ready) == ("inprocess", True)
            await worker.client.release(match)
            await eventually(lambda: control.loads[-1].pages_free == 8)
            await worker.offer(*range(3, 11))  # evicts
            await eventually(lambda: len(control.keys) == control.loads[-1].pages_cached > 2)

    run(body)


def test_leases_end_without_anybody_asking():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.node("kv-0", lossless=False)
            worker = await cluster.worker(KvClientConfig(lease_s=0.2, lease_margin_s=0.05))
            await worker.offer(1, 2)
            [match] = await worker.match(2)
            store = node._keeper.store
            assert store.num_evictable == 0
            await eventually(lambda: store.num_evictable == 2)
            assert match.valid_until_s > 0

    run(body)


def test_what_a_reader_counts_on_ends_before_the_lease_does():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.node("kv-0", bounds=StoreBounds(max_lease_s=2.0))
            worker = await cluster.worker(KvClientConfig(lease_s=100.0, lease_margin_s=0.5))
            await worker.offer(1)
            [match] = await worker.match(1)
            expires_s = node._keeper.store.next_deadline_s()
            assert expires_s - 1.0 < match.valid_until_s <= expires_s - 0.5

    run(body)


def test_a_node_whose_transport_died_says_so_and_ends(monkeypatch):
    """It used to stay ready and a member of the cluster, and refused every offer."""

    async def body() -> None:
        async with Cluster() as cluster:
            plan = FaultPlan()
            monkeypatch.setattr(
                "kvstore.node.server.create_transport",
                lambda *arguments, **options: FaultyTransport(create_transport(*arguments, **options), plan),
            )
            node = await cluster.node("kv-0")
            worker = await cluster.worker()
            ended = asyncio.create_task(node.wait_ended())
            async with connect(node.address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                before = await health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert before.status == health_pb2.HealthCheckResponse.SERVING
                plan.plan(1, Fault(crash=True))
                assert (await worker.offer(1)).refused == {key_of(1)}
                assert await ended == "the transport thread failed: a planned crash"
                after = await health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert after.status == health_pb2.HealthCheckResponse.NOT_SERVING
            await eventually(lambda: bool(cluster.control.loads) and not cluster.control.loads[-1].ready)
            await node.stop()
            assert await node.wait_ended() == "the transport thread failed: a planned crash"

    run(body)


def test_stopping_twice_or_before_the_start_is_allowed():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.node("kv-0")
            await node.stop()
            await node.stop()
            never = StorageNode(cluster.config("kv-1"), fabric=cluster.fabric)
            await never.stop()

    run(body)


def test_a_start_that_fails_can_be_stopped():
    async def body() -> None:
        async with Cluster() as cluster:
            node = StorageNode(cluster.config("kv-0", transports=("pigeon",)), fabric=cluster.fabric)
            with pytest.raises(ValueError, match="pigeon"):
                await node.start()
            await node.stop()

    run(body)


def test_pages_larger_than_the_share_for_writing_are_refused_and_the_others_stored():
    async def body() -> None:
        async with Cluster() as cluster:
            await cluster.node("kv-0", num_pages=8)
            worker = await cluster.worker()
            outcome = await worker.offer(1, 2, 3, 4)
            assert outcome.stored == {key_of(1), key_of(2)}
            assert outcome.refused == {key_of(3), key_of(4)}

    run(body)


def test_over_nixl_too():
    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.node("kv-0", transports=("nixl",))
            worker = await cluster.worker(transport="nixl")
            outcome = await worker.offer(*NUMBERS)
            assert outcome.stored == {key_of(number) for number in NUMBERS}
            assert await worker.fetch(32) == list(NUMBERS)
            assert node._keeper.stats.path.startswith("nixl:")
            assert np.array_equal(worker.region[:PAGE_BYTES], page_of(1))

    run(body)
