"""The gateway with the real control plane, its registration and its watch; only the worker's model is scripted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from cluster.catalog import EmbeddedCatalog
from cluster.control import ControlConfig, ControlPlane
from cluster.gateway import Gateway, GatewayConfig
from engine.tokenizer import load_tokenizer
from protos import common_pb2, control_pb2, control_pb2_grpc
from protos.registration import NodeConfig, Registration
from protos.serving import connect
from tests.cluster.gateway.harness import events, source
from tests.cluster.gateway.peers import MODEL, Script, ScriptedWorker, eventually


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCatalog]:
    embedded = EmbeddedCatalog(tmp_path_factory.mktemp("catalog"))
    embedded.start()
    yield embedded
    embedded.stop()


@contextlib.asynccontextmanager
async def control_plane(catalog: EmbeddedCatalog, cluster: str) -> AsyncIterator[ControlPlane]:
    plane = ControlPlane(ControlConfig(cluster=cluster, catalog_url=catalog.url, lock_ttl_s=1.0))
    await plane.start()
    try:
        yield plane
    finally:
        await plane.stop()


@contextlib.asynccontextmanager
async def registered(worker: ScriptedWorker, control_address: str) -> AsyncIterator[Registration]:
    config = NodeConfig(node_id=worker.node_id, control_address=control_address, heartbeat_s=0.05, reconnect_max_s=0.2)
    state = worker.state()
    registration = Registration(config, state.node, lambda: state.load)
    await registration.start()
    try:
        yield registration
    finally:
        await registration.stop()


@contextlib.asynccontextmanager
async def gateway_of(folder: Path, control_address: str) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    node = NodeConfig(node_id="gateway-0", control_address=control_address, heartbeat_s=0.05, reconnect_max_s=0.2)
    gateway = Gateway(GatewayConfig(node=node, models=(source(folder),), http_port=0, grpc_port=0, stop_grace_s=0.0))
    await gateway.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=30) as http:
            yield gateway, http
    finally:
        await gateway.stop()


async def until_ready(http: httpx.AsyncClient, status: int = 200) -> None:
    async with asyncio.timeout(30):
        while (await http.get("/readyz")).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_workers_come_and_go_and_the_gateway_is_listed(model_folder: Path, catalog: EmbeddedCatalog):
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0", Script(output=load_tokenizer(source(model_folder)).encode("the fox")))
        await worker.start()
        async with (
            control_plane(catalog, "come-and-go") as plane,
            gateway_of(model_folder, plane.address) as (gateway, http),
        ):
            await until_ready(http, 503)
            for _ in range(2):
                async with registered(worker, plane.address):
                    await until_ready(http)
                    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
                    assert answer.json()["choices"][0]["text"] == "the fox"
                await until_ready(http, 503)
            async with connect(plane.address) as channel:
                stub = control_pb2_grpc.ControlServiceStub(channel)
                status = await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=30)
            (node,) = [state.node for state in status.nodes if state.node.role == common_pb2.ROLE_GATEWAY]
            assert node.http_address == gateway.http_address
        await worker.die()

    asyncio.run(scenario())


def test_streams_outlive_the_control_plane_and_its_successor_finds_everybody(
    model_folder: Path, catalog: EmbeddedCatalog
):
    async def scenario() -> None:
        script = Script(pause_after=2, output=load_tokenizer(source(model_folder)).encode("the quick brown fox jumps"))
        worker = ScriptedWorker("decode-0", script)
        await worker.start()
        async with contextlib.AsyncExitStack() as stack:
            first = contextlib.AsyncExitStack()
            plane = await first.enter_async_context(control_plane(catalog, "outlive"))
            await stack.enter_async_context(registered(worker, plane.address))
            gateway, http = await stack.enter_async_context(gateway_of(model_folder, plane.address))
            await until_ready(http)
            body = {"model": MODEL, "prompt": "x", "stream": True}
            stream = asyncio.create_task(http.post("/v1/completions", json=body))
            await eventually(lambda: worker.sent == 2)
            await first.aclose()
            assert (await http.get("/readyz")).status_code == 200
            second = await stack.enter_async_context(control_plane(catalog, "outlive"))
            assert second.address == plane.address
            await eventually(lambda: gateway._view.control_epoch > 1)
            await eventually(lambda: gateway._view.nodes["decode-0"].unconfirmed_since_s is None)
            script.pause_after = None
            found = events((await stream).text)
            assert found[-1] == "[DONE]"
            assert "".join(event["choices"][0]["text"] for event in found[:-1]) == "the quick brown fox jumps"
            assert len(worker.starts) == len(worker.gateways) == 1
        await worker.die()

    asyncio.run(scenario())
