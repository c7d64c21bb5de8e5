"""The control plane over real sockets, with the real catalog; what freezes or is killed is a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.catalog import Catalog, CatalogUnavailable, ControlLockHeld, EmbeddedCatalog, Placement
from cluster.control import ControlConfig, ControlPlane
from protos import common_pb2, control_pb2, control_pb2_grpc
from protos.serving import connect
from tests.cluster.control import lab
from tests.cluster.control.lab import DEADLINE_S

LONG_S = 600.0
"""Longer than any test: what happens all the same does not happen because this has passed."""


@pytest.fixture
def config(catalog) -> ControlConfig:
    return ControlConfig(
        cluster=lab.new_cluster_name(), catalog_url=catalog.url, silence_s=LONG_S, lock_ttl_s=0.6, grace_s=0.1
    )


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_watchers_and_the_status_show_who_has_joined_what_they_hold_and_when_they_leave(config):
    async def check() -> None:
        async with lab.control_plane(config) as plane, lab.observer(plane.address) as observer:
            async with lab.joined(plane.address, lab.make_node("decode-0")) as node:
                node.publish([key(1), key(2)], [])
                await observer.until(lambda seen: seen.prefixes.get("decode-0") == {key(1), key(2)})
                node.publish([key(3)], [key(1)])
                await observer.until(lambda seen: seen.prefixes.get("decode-0") == {key(2), key(3)})
                async with lab.observer(plane.address) as late:
                    await late.until(lambda seen: seen.prefixes.get("decode-0") == {key(2), key(3)})
                answer = await lab.status(plane.address)
                assert [(state.node.node_id, state.load.ready) for state in answer.nodes] == [("decode-0", True)]
                assert (answer.cluster, answer.catalog) == (config.cluster, config.catalog_url)
                assert answer.control_epoch == observer.control_epoch == 1
            await observer.until(lambda seen: seen.gone)
            assert observer.gone[0].reason == "left"

    asyncio.run(check())


def test_storage_views_reach_the_nodes(config):
    async def check() -> None:
        async with lab.control_plane(config) as plane, lab.joined(plane.address, lab.make_node("decode-0")) as node:
            assert list((await node.directives.get()).storage.members) == []
            storage = lab.make_node("kv-0", role=common_pb2.ROLE_KV)
            async with lab.joined(plane.address, storage, control_pb2.Load(capacity_bytes=1 << 30)):
                async with asyncio.timeout(DEADLINE_S):
                    view = (await node.directives.get()).storage
                assert [(member.node_id, member.weight) for member in view.members] == [("kv-0", 1.0)]
            async with asyncio.timeout(DEADLINE_S):
                later = (await node.directives.get()).storage
            assert list(later.members) == []
            assert later.membership_epoch > view.membership_epoch

    asyncio.run(check())


def test_a_killed_node_is_gone_at_once(config):
    async def check() -> None:
        async with lab.control_plane(config) as plane, lab.observer(plane.address) as observer:
            with lab.process(lab.NODE_PROCESS, "decode-0", plane.address) as child:
                assert await lab.said(child) == "registered"
                await observer.until(lambda seen: "decode-0" in seen.nodes)
                child.kill()
                await observer.until(lambda seen: seen.gone)
            assert observer.gone[0].reason == "its stream broke"
            async with lab.joined(plane.address, lab.make_node("decode-0", "b")):
                assert dict((await lab.status(plane.address)).restarts) == {"decode-0": 1}

    asyncio.run(check())


def test_a_frozen_node_is_gone_after_its_silence_and_comes_back_when_it_wakes(config):
    async def check() -> None:
        async with lab.control_plane(replace(config, silence_s=1.0)) as plane, lab.observer(plane.address) as observer:
            with lab.process(lab.NODE_PROCESS, "decode-0", plane.address) as child:
                assert await lab.said(child) == "registered"
                await observer.until(lambda seen: "decode-0" in seen.nodes)
                child.send_signal(signal.SIGSTOP)
                await observer.until(lambda seen: seen.gone)
                assert observer.gone[0].reason.startswith("silent for")
                child.send_signal(signal.SIGCONT)
                await observer.until(lambda seen: "decode-0" in seen.nodes)
            assert dict((await lab.status(plane.address)).restarts) == {}

    asyncio.run(check())


def test_a_process_that_was_replaced_cannot_register_again(config):
    async def check() -> None:
        async with (
            lab.control_plane(config) as plane,
            lab.joined(plane.address, lab.make_node("decode-0", "a")),
            lab.joined(plane.address, lab.make_node("decode-0", "b")),
            connect(plane.address) as channel,
        ):
            call = control_pb2_grpc.ControlServiceStub(channel).Join(timeout=DEADLINE_S)
            try:
                old = lab.make_node("decode-0", "a")
                await call.write(control_pb2.JoinRequest(sequence=1, registration=old))
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call.read()
            finally:
                call.cancel()
            assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "replaced by b" in raised.value.details()

    asyncio.run(check())


def test_nonsense_on_a_join_stream_is_an_invalid_argument(config):
    async def check() -> None:
        async with lab.control_plane(config) as plane, connect(plane.address) as channel:
            call = control_pb2_grpc.ControlServiceStub(channel).Join(timeout=DEADLINE_S)
            try:
                await call.write(control_pb2.JoinRequest(sequence=3))
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call.read()
            finally:
                call.cancel()
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(check())


def test_evicting_prefixes_reaches_the_workers_and_is_recorded(config):
    async def check() -> None:
        async with lab.control_plane(config) as plane, lab.joined(plane.address, lab.make_node("decode-0")) as node:
            assert await lab.evict(plane.address) == ["decode-0"]
            async with asyncio.timeout(DEADLINE_S):
                while (await node.directives.get()).WhichOneof("directive") != "evict":
                    pass
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await lab.evict(plane.address, "decode-0", "nobody")
            assert raised.value.code() == grpc.StatusCode.NOT_FOUND
            async with Catalog.open(config.catalog_url, cluster=config.cluster) as catalog:
                (entry,) = await catalog.audit_log(10)
            assert (entry.action, entry.details) == ("evict-prefixes", "all workers")
            assert "127.0.0.1" in entry.actor

    asyncio.run(check())


def test_the_status_states_what_is_missing_slow_or_does_not_fit(config):
    async def check() -> None:
        async with Catalog.open(config.catalog_url, cluster=config.cluster) as catalog:
            await catalog.set_placement(Placement(counts={"decode": 1, "prefill": 1, "kv": 2}), actor="test")
        prefill = lab.make_node("prefill-0", role=common_pb2.ROLE_PREFILL)
        prefill.fingerprint.page_size = 16
        own = control_pb2.Degradation(kind="eager", consequence="no captured graphs", since_unix_s=5.0)
        slow = control_pb2.Load(transport="nixl:tcp")
        async with lab.control_plane(config) as plane, lab.joined(plane.address, lab.make_node("decode-0"), slow):
            before = await lab.status_once(plane.address, lambda answer: "transport-tcp" in lab.kinds(answer))
            assert lab.kinds(before) == ["missing-nodes", "missing-nodes", "transport-tcp"]
            async with lab.joined(plane.address, prefill, control_pb2.Load(degradations=[own])):
                after = await lab.status_once(plane.address, lambda answer: "eager" in lab.kinds(answer))
        assert [(entry.kind, entry.consequence.partition(":")[0]) for entry in after.degradations] == [
            ("eager", "prefill-0"),
            ("fingerprint-mismatch", ""),
            ("missing-nodes", "kv"),
            ("transport-tcp", "decode-0"),
        ]
        since = {entry.kind: entry.since_unix_s for entry in after.degradations}
        assert since["eager"] == 5.0
        assert since["missing-nodes"] == before.degradations[0].since_unix_s <= time.time()

    asyncio.run(check())


def test_health_says_serving(config):
    async def check() -> None:
        async with lab.control_plane(config) as plane, connect(plane.address) as channel:
            request = health_pb2.HealthCheckRequest(service="headrace.v1.ControlService")
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(check())


# Restarts.


def test_after_a_restart_nodes_come_back_to_the_same_address_under_a_newer_epoch(config):
    async def check() -> None:
        async with lab.control_plane(config) as first:
            address = first.address
            async with lab.joined(address, lab.make_node("decode-0")) as node:
                node.publish([key(1)], [])
                async with lab.observer(address) as observer:
                    await observer.until(lambda seen: seen.prefixes.get("decode-0"))
                await first.stop()
                async with lab.control_plane(config) as second, lab.observer(address) as observer:
                    assert second.address == address
                    await observer.until(lambda seen: seen.prefixes.get("decode-0") == {key(1)})
                    answer = await lab.status(address)
                    assert (answer.control_epoch, dict(answer.restarts)) == (2, {})

    asyncio.run(check())


def test_after_a_kill_the_next_one_waits_for_the_lock_and_takes_over(config):
    async def check() -> None:
        arguments = (config.cluster, config.catalog_url, str(config.lock_ttl_s))
        with lab.process(lab.CONTROL_PROCESS, *arguments) as child:
            address = await lab.said(child)
            async with lab.joined(address, lab.make_node("decode-0")) as node:
                await lab.status_once(address, lambda answer: answer.nodes)
                child.kill()
                child.wait(DEADLINE_S)
                async with lab.control_plane(config) as plane, lab.observer(address) as observer:
                    assert plane.address == address
                    await observer.until(lambda seen: "decode-0" in seen.nodes)
                    await node.registered(DEADLINE_S)
                    assert node.control_epoch == 2

    asyncio.run(check())


def test_a_frozen_control_plane_that_wakes_up_after_it_was_replaced_stops_acting(config):
    async def check() -> None:
        arguments = (config.cluster, config.catalog_url, str(config.lock_ttl_s))
        with lab.process(lab.CONTROL_PROCESS, *arguments) as child:
            address = await lab.said(child)
            async with lab.joined(address, lab.make_node("decode-0")):
                child.send_signal(signal.SIGSTOP)
                async with lab.control_plane(config) as plane:
                    # The frozen one still has the port that the nodes know. That is stated, for as long as it is so.
                    assert plane.address != address
                    assert "control-moved" in lab.kinds(await lab.status(plane.address))
                    child.send_signal(signal.SIGCONT)
                    assert await lab.said(child) == "control epoch 1 was replaced by 2"
                    assert await asyncio.to_thread(child.wait, DEADLINE_S) == 0
                    async with lab.observer(plane.address) as observer:
                        await observer.until(lambda seen: "decode-0" in seen.nodes)
                    answer = await lab.status(address)
                    assert (answer.control_epoch, lab.kinds(answer)) == (2, [])

    asyncio.run(check())


def test_streams_of_a_fenced_control_plane_end(config):
    async def check() -> None:
        async with lab.control_plane(config) as plane, lab.observer(plane.address) as observer:
            await observer.until(lambda seen: seen.control_epoch)
            async with Catalog.open(config.catalog_url, cluster=config.cluster) as catalog:
                await _take_over(catalog)
                async with asyncio.timeout(DEADLINE_S):
                    assert "was replaced by 2" in await plane.wait_ended()
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await observer.until(lambda seen: False)
                assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await lab.status(plane.address)
                assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
                # Its last words do not reach the catalog, nor does it give away a lock that is another's.
                await plane.stop()
                with pytest.raises(ControlLockHeld):
                    await catalog.acquire_control("third", ttl_s=LONG_S)

    async def _take_over(catalog: Catalog) -> None:
        # What a clock that jumps, or an operator's hand, can do to a lock.
        await catalog._client.delete(catalog._key("lock"))
        await catalog.acquire_control("second", ttl_s=LONG_S)

    asyncio.run(check())


def test_two_control_planes_of_one_cluster_do_not_run_at_once(config):
    async def check() -> None:
        impatient = replace(config, lock_ttl_s=0.2, start_deadline_s=0.5)
        patient = replace(config, lock_ttl_s=DEADLINE_S, start_deadline_s=LONG_S)
        async with lab.control_plane(patient) as plane:
            with pytest.raises(ControlLockHeld):
                await ControlPlane(impatient).start()
            assert (await lab.status(plane.address)).control_epoch == 1
        async with lab.control_plane(impatient) as plane:
            assert (await lab.status(plane.address)).control_epoch == 2

    asyncio.run(check())


def test_a_named_port_that_is_taken_stops_the_start_and_gives_the_lock_back(config):
    async def check() -> None:
        async with lab.control_plane(config) as plane:
            other = replace(config, cluster=lab.new_cluster_name(), port=int(plane.address.rpartition(":")[2]))
            with pytest.raises(OSError, match="cannot listen"):
                await ControlPlane(other).start()
            async with Catalog.open(other.catalog_url, cluster=other.cluster) as catalog:
                assert await catalog.acquire_control("next", ttl_s=LONG_S) == 2

    asyncio.run(check())


def test_an_error_that_nobody_foresaw_ends_it_and_says_why(config, caplog):
    async def check() -> None:
        async with (
            Catalog.open(config.catalog_url, cluster=config.cluster) as catalog,
            lab.control_plane(config) as plane,
        ):
            await catalog._client.rpush(catalog._key("placement"), "a list where a string should be")
            async with asyncio.timeout(DEADLINE_S):
                assert "WRONGTYPE" in await plane.wait_ended()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await lab.status(plane.address)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(check())
    assert "control plane: lock has failed" in caplog.text


def test_stopping_twice_or_before_the_start_does_no_harm(config):
    async def check() -> None:
        await ControlPlane(config).stop()
        async with lab.control_plane(config) as plane:
            await plane.stop()
            assert await plane.wait_ended() == "stopped"

    asyncio.run(check())


# The catalog's failures.


def test_without_the_catalog_requests_go_on_and_changes_are_refused_until_it_is_back(tmp_path):
    async def check() -> None:
        embedded = EmbeddedCatalog(tmp_path / "catalog")
        embedded.start()
        config = ControlConfig(
            cluster="c", catalog_url=embedded.url, lock_ttl_s=0.3, silence_s=LONG_S, catalog_deadline_s=0.5
        )
        async with lab.control_plane(config) as plane, lab.joined(plane.address, lab.make_node("decode-0")) as node:
            os.kill(embedded.pid, signal.SIGKILL)
            await lab.status_once(plane.address, lambda answer: lab.kinds(answer) == ["catalog-unreachable"])
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await lab.evict(plane.address)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
            async with lab.joined(plane.address, lab.make_node("decode-1")), lab.observer(plane.address) as observer:
                await observer.until(lambda seen: set(seen.nodes) == {"decode-0", "decode-1"})
                embedded.start()
                await lab.status_once(plane.address, lambda answer: lab.kinds(answer) == [])
                assert await lab.evict(plane.address) == ["decode-0", "decode-1"]
                async with Catalog.open(embedded.url, cluster="c") as catalog:
                    async with asyncio.timeout(DEADLINE_S):
                        while set((await catalog.roster()).nodes) != {"decode-0", "decode-1"}:
                            pass
            assert node.control_epoch == 1
        embedded.stop()

    asyncio.run(check())


def test_a_catalog_that_lost_its_data_gets_back_what_is_known(config):
    async def check() -> None:
        async with Catalog.open(config.catalog_url, cluster=config.cluster) as catalog:
            await catalog.set_placement(Placement(counts={"decode": 1}), actor="test")
            async with lab.control_plane(config) as plane, lab.joined(plane.address, lab.make_node("decode-0")):
                await lab.status_once(plane.address, lambda answer: answer.nodes)
                keys = await catalog._client.keys(catalog._key("*"))
                await catalog._client.delete(*keys)
                async with asyncio.timeout(DEADLINE_S):
                    while "decode-0" not in (await catalog.roster()).nodes:
                        pass
                    while await catalog.control_address() != plane.address:
                        pass
                assert await catalog.placement() == Placement(counts={"decode": 1})
            assert await catalog.acquire_control("next", ttl_s=LONG_S) == 2

    asyncio.run(check())


def test_a_placement_that_does_not_parse_is_stated_and_changes_nothing(config):
    async def check() -> None:
        async with (
            Catalog.open(config.catalog_url, cluster=config.cluster) as catalog,
            lab.control_plane(config) as plane,
        ):
            await catalog._client.set(catalog._key("placement"), "nonsense")
            await lab.status_once(plane.address, lambda answer: lab.kinds(answer) == ["catalog-corrupt"])
            await catalog.set_placement(Placement(counts={"decode": 1}), actor="test")
            await lab.status_once(plane.address, lambda answer: lab.kinds(answer) == ["missing-nodes"])

    asyncio.run(check())


def test_a_start_without_a_catalog_says_so(tmp_path):
    async def check() -> None:
        config = ControlConfig(
            cluster="c", catalog_url=f"unix://{tmp_path}/nobody.sock", lock_ttl_s=0.1, start_deadline_s=0.3
        )
        with pytest.raises(CatalogUnavailable):
            await ControlPlane(config).start()

    asyncio.run(check())


@pytest.mark.parametrize(
    "wrong", [{"cluster": ""}, {"silence_s": 0.0}, {"lock_ttl_s": -1.0}, {"start_deadline_s": 4.0}]
)
def test_a_nonsense_config_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ControlConfig(**{"cluster": "c", "catalog_url": "redis://localhost", **wrong})
