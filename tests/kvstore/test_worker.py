"""What a worker's shell tells the step loop and the cluster about pages that it wrote out."""

from __future__ import annotations

import asyncio
import queue

from kvstore.pages import ColdPage, OfferPages, OfferSettled
from kvstore.plane import PagePlane, PlaneConfig
from kvstore.transport import create_transport
from kvstore.worker import WorkerShell
from protos import common_pb2, control_pb2
from protos.registration import NodeConfig
from tests.kvstore.node.harness import WAIT_S, Cluster, run
from tests.kvstore.node.samples import LAYOUT, PAGE_BYTES, key_of
from tests.kvstore.transport.faults import Fault


def test_pages_that_no_storage_node_took_are_told_until_one_takes_some(monkeypatch):
    """They used to vanish: dropped from the pool, stored nowhere, counted by nobody."""

    async def body() -> None:
        async with Cluster() as cluster:
            monkeypatch.setattr(
                "kvstore.plane.create_transport",
                lambda *arguments: create_transport(*arguments, fabric=cluster.fabric),
            )
            node = await cluster.bare_node()
            inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
            config = PlaneConfig(pool_bytes=4 * PAGE_BYTES, transports=("inprocess",))
            plane = PagePlane(LAYOUT, config, "worker", inbox)
            plane.start()
            shell = WorkerShell(
                NodeConfig(node_id="worker", control_address="127.0.0.1:1"),
                common_pb2.ROLE_PREFILL,
                control_pb2.Fingerprint(),
                plane,
                inbox,
            )
            shell.client.update(cluster.view())
            cold = tuple(ColdPage(key_of(number), None, key_of(number), number) for number in range(4))

            async def offer(offer_id: int, *pages: ColdPage) -> object:
                shell.carry_out(OfferPages(offer_id, pages))
                return await asyncio.to_thread(inbox.get, timeout=WAIT_S)

            try:
                assert not shell.current_load().degradations
                node.faults.plan(1, Fault(error="the link is down"))
                assert await offer(1, *cold) == OfferSettled(1, num_refused=4)
                [told] = shell.current_load().degradations
                assert told.kind == "kv-store-refuses"
                node.faults.plan(2, Fault(corrupt=True))
                assert await offer(2, *cold) == OfferSettled(2, num_refused=1)
                assert not shell.current_load().degradations
                assert await offer(3, *cold) == OfferSettled(3)
            finally:
                await shell.stop()
                await asyncio.to_thread(plane.close)

    run(body)
