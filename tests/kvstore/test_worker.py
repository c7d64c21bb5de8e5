"""What a worker's shell tells the step loop and the cluster about pages that it wrote out."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvstore.pages import ColdPage, OfferPages, OfferSettled, StorageChanged
from kvstore.plane import PagePlane, PlaneConfig
from kvstore.transport import Pull, PullSettled, boot_time_s, create_transport
from kvstore.worker import WorkerShell
from protos import common_pb2, control_pb2
from protos.registration import NodeConfig
from tests.kvstore.node.harness import WAIT_S, Cluster, run
from tests.kvstore.node.samples import LAYOUT, PAGE_BYTES, key_of
from tests.kvstore.transport.faults import Fault, FaultPlan, FaultyTransport


@asynccontextmanager
async def worker_shell(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, plan: FaultPlan
) -> AsyncIterator[tuple[WorkerShell, queue.SimpleQueue[object]]]:
    """A shell and the inbox that it speaks to. plan: for what the worker pulls."""
    monkeypatch.setattr(
        "kvstore.plane.create_transport",
        lambda *arguments: FaultyTransport(create_transport(*arguments, fabric=cluster.fabric), plan),
    )
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    plane = PagePlane(LAYOUT, PlaneConfig(pool_bytes=4 * PAGE_BYTES, transports=("inprocess",)), "worker", inbox)
    plane.start()
    config = NodeConfig(node_id="worker", control_address=cluster.control_address)
    shell = WorkerShell(config, common_pb2.ROLE_PREFILL, control_pb2.Fingerprint(), plane, inbox)
    shell.client.update(cluster.view())
    try:
        yield shell, inbox
    finally:
        await shell.stop()
        await asyncio.to_thread(plane.close)


def test_pages_that_no_storage_node_took_are_told_until_one_takes_some(monkeypatch):
    """They used to vanish: dropped from the pool, stored nowhere, counted by nobody."""

    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            async with worker_shell(cluster, monkeypatch, FaultPlan()) as (shell, inbox):
                cold = tuple(ColdPage(key_of(number), None, key_of(number), number) for number in range(4))

                async def offer(offer_id: int, *pages: ColdPage) -> object:
                    shell.carry_out(OfferPages(offer_id, pages))
                    return await asyncio.to_thread(inbox.get, timeout=WAIT_S)

                assert not shell.current_load().degradations
                node.faults.plan(1, Fault(error="the link is down"))
                assert await offer(1, *cold) == OfferSettled(1, num_refused=4)
                [told] = shell.current_load().degradations
                assert told.kind == "kv-store-refuses"
                node.faults.plan(2, Fault(corrupt=True))
                assert await offer(2, *cold) == OfferSettled(2, num_refused=1)
                assert not shell.current_load().degradations
                assert await offer(3, *cold) == OfferSettled(3)

    run(body)


def test_a_storage_node_that_left_is_forgotten_and_its_pulls_settle(monkeypatch):
    """Nobody ever forgot a peer: a pull from a frozen node kept its pages until the kernel gave the connection up."""

    async def body() -> None:
        async with Cluster() as cluster:
            node = await cluster.bare_node()
            plan = FaultPlan()
            plan.plan(1, Fault(hold_end=True))
            async with worker_shell(cluster, monkeypatch, plan) as (shell, inbox):
                places = np.zeros(1, np.int64)
                sizes = np.array([PAGE_BYTES], np.int64)
                shell.carry_out(
                    Pull(
                        pull_id=1,
                        card=node.card,
                        remote_offsets=places,
                        local_offsets=places,
                        num_bytes=sizes,
                        deadline_s=boot_time_s() + 10 * WAIT_S,
                    )
                )
                assert await asyncio.to_thread(plan.landed(1).wait, WAIT_S)
                cluster.control.storage.membership_epoch = cluster.epoch + 1
                await shell.start(lambda server: [])
                events = [await asyncio.to_thread(inbox.get, timeout=WAIT_S) for _ in range(2)]
                assert StorageChanged(0) in events
                [settled] = [event for event in events if isinstance(event, PullSettled)]
                assert settled.error == f"{node.node_id} was forgotten"

    run(body)
