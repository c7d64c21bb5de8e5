"""Real workers whose step loop crashes: the control plane is not told that they left in good order."""

from __future__ import annotations

import asyncio

import pytest

from cluster.control import ControlConfig, ControlPlane
from decode_node import DecodeConfig, DecodeWorker
from engine.source import ModelSource
from kvstore.plane import PlaneConfig
from prefill_node import PrefillConfig, PrefillWorker
from protos import control_pb2, control_pb2_grpc
from protos.registration import NodeConfig
from protos.serving import connect
from tests.models import tiny_model

DEADLINE_S = 30.0


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("crashes", [True, False])
def test_a_worker_that_crashed_shows_as_a_restart_and_one_that_was_stopped_does_not(catalog, tmp_path, role, crashes):
    """A crashed one used to say that it leaves: however often it crashed, no restart was counted."""
    source = ModelSource(name="tiny", weights="random:7", config=str(tiny_model(tmp_path)))

    def build(control_address: str) -> DecodeWorker | PrefillWorker:
        node = NodeConfig(node_id="w0", control_address=control_address, heartbeat_s=0.05)
        plane = PlaneConfig(pool_bytes=1 << 20, staging_bytes=1 << 20)
        if role == "decode":
            return DecodeWorker(DecodeConfig(node=node, model=source, plane=plane))
        return PrefillWorker(PrefillConfig(node=node, model=source, plane=plane))

    async def scenario() -> None:
        plane = ControlPlane(ControlConfig(cluster=f"crashed-{role}-{crashes}", catalog_url=catalog.url))
        await plane.start()
        async with connect(plane.address) as channel:
            control = control_pb2_grpc.ControlServiceStub(channel)

            async def restarts_once_present(incarnations: set[str]) -> int:
                async with asyncio.timeout(DEADLINE_S):
                    while True:
                        status = await control.GetStatus(control_pb2.GetStatusRequest(), timeout=DEADLINE_S)
                        if {state.node.incarnation for state in status.nodes} == incarnations:
                            return status.restarts.get("w0", 0)
                        await asyncio.sleep(0.02)

            first, second = build(plane.address), build(plane.address)
            try:
                await first.start()
                assert await restarts_once_present({first.incarnation}) == 0
                if crashes:
                    first._inbox.put("no event of any core")
                    async with asyncio.timeout(DEADLINE_S):
                        assert "TypeError" in await first.wait_ended()
                await first.stop()
                await restarts_once_present(set())
                await second.start()
                assert await restarts_once_present({second.incarnation}) == int(crashes)
            finally:
                await first.stop()
                await second.stop()
                await plane.stop()

    asyncio.run(scenario())
