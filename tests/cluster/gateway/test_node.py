"""The gateway as a process: start, stop, health, metrics, and what happens when others are away."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.gateway import Gateway, GatewayConfig, LimitsConfig, PlacementConfig
from cluster.gateway.http_server import listen
from engine.errors import BrokenCheckpoint
from protos import common_pb2
from protos.registration import NodeConfig
from tests.cluster.gateway.conftest import CONTEXT_TOKENS
from tests.cluster.gateway.harness import events, serving, source
from tests.cluster.gateway.peers import MODEL, Script, ScriptedControl, ScriptedWorker, eventually


def test_a_gateway_registers_what_it_listens_on(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            (node,) = harness.control.registered
            assert (node.node_id, node.role) == ("gateway-0", common_pb2.ROLE_GATEWAY)
            assert (node.address, node.http_address) == (harness.gateway.address, harness.gateway.http_address)
            assert node.incarnation == harness.gateway.incarnation

    asyncio.run(scenario())


def test_a_gateway_that_listens_everywhere_advertises_its_nodes_address(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(), http_host="0.0.0.0", grpc_host="0.0.0.0") as harness:
            (node,) = harness.control.registered
            assert node.http_address.startswith("127.0.0.1:")
            assert node.address.startswith("127.0.0.1:")
            assert (await harness.http.get("/healthz")).status_code == 200

    asyncio.run(scenario())


def test_models_are_listed_and_found_by_name(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            models = await harness.with_openai(lambda client: client.models.list())
            assert [model.id for model in models] == [MODEL]
            model = (await harness.http.get(f"/v1/models/{MODEL}")).json()
            assert (model["object"], model["max_model_len"]) == ("model", CONTEXT_TOKENS)

    asyncio.run(scenario())


def test_the_api_describes_its_bodies_and_refusals(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            document = (await harness.http.get("/openapi.json")).json()
            references: set[str] = set()

            def collect(value: Any) -> None:
                if isinstance(value, dict):
                    references.update(item for key, item in value.items() if key == "$ref")
                    value = list(value.values())
                for item in value if isinstance(value, list) else ():
                    collect(item)

            collect(document)
            assert "#/components/schemas/ChatBody" in references
            for reference in references:
                assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
            operation = document["paths"]["/v1/chat/completions"]["post"]
            assert {"200", "400", "404", "413", "415", "429", "503"} <= set(operation["responses"])

    asyncio.run(scenario())


def test_readiness_follows_the_decode_workers_and_life_does_not(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            worker = harness.workers[0]

            async def statuses() -> list[int]:
                return [(await harness.http.get(path)).status_code for path in ("/healthz", "/health", "/readyz")]

            assert await statuses() == [200, 200, 200]
            harness.control.show(worker.state(ready=False))
            await eventually(lambda: not harness.control.loads[-1].ready)
            assert await statuses() == [200, 503, 503]
            assert MODEL in (await harness.http.get("/readyz")).json()["reason"]
            harness.control.show(worker.state(model="another"))
            harness.control.show(worker.state())
            await eventually(lambda: harness.control.loads[-1].ready)
            assert await statuses() == [200, 200, 200]

    asyncio.run(scenario())


async def metrics_of(http: httpx.AsyncClient) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and labels."""
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation or family.name == "target", family.name
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_metrics_count_requests_attempts_and_the_load_of_the_workers(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(cached_tokens=4)) as harness:
            worker = harness.workers[0]
            worker.script.output = harness.tokenizer.encode("the quick brown fox")
            worker.load = {"running": 3, "waiting": 2, "pages_free": 600}
            harness.control.show(worker.state())
            assert (await harness.chat()).status_code == 200
            worker.script.answer = "reject"
            assert (await harness.complete()).status_code == 429
            await eventually(lambda: harness.gateway._view.nodes["decode-0"].load.running == 3)
            metrics = await metrics_of(harness.http)

            def value(name: str, **labels: str) -> float:
                return sum(sample for key, sample in metrics[name].items() if labels.items() <= dict(key).items())

            chat = {"gen_ai_operation_name": "chat", "gen_ai_request_model": MODEL}
            for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
                assert value(f"gen_ai_server_{name}_seconds_count", **chat) == 1
            assert value("gen_ai_server_request_duration_seconds_count", error_type="overloaded") == 1
            assert value("headrace_attempts_total", outcome="accepted") == 1
            assert value("headrace_attempts_total", outcome="rejected") == 1
            assert value("headrace_rejections_total") == 1
            assert value("headrace_prompt_tokens_total", source="cache") == 4
            assert value("headrace_output_tokens_total") == len(worker.script.output)
            assert value("headrace_open_requests") == 0
            node = {"node": "decode-0", "role": "decode"}
            assert value("headrace_running_requests", **node) == 3
            assert value("headrace_waiting_requests", **node) == 2
            assert value("headrace_pages_used", **node) == 400
            assert value("headrace_pages_free", **node) == 600
            assert value("headrace_node_ready", **node) == 1

    asyncio.run(scenario())


def test_a_lost_worker_is_counted_as_a_retry(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(fail_after=(1, "ABORTED"))) as harness:
            worker = harness.workers[0]
            worker.script.output = [300, 300]
            response = asyncio.create_task(harness.chat())
            await eventually(lambda: len(worker.starts) >= 2)
            worker.script.fail_after = None
            assert (await response).status_code == 200
            metrics = await metrics_of(harness.http)
            assert metrics["headrace_retries_total"][(("cause", "aborted"),)] >= 1

    asyncio.run(scenario())


def test_two_gateways_in_one_process_share_no_metrics(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as one, serving(model_folder, Script()) as other:
            one.workers[0].script.output = [300]
            await one.chat()
            assert "headrace_attempts_total" in await metrics_of(one.http)
            assert "headrace_attempts_total" not in await metrics_of(other.http)

    asyncio.run(scenario())


def test_requests_flow_while_the_control_plane_is_away(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            harness.workers[0].script.output = harness.tokenizer.encode("the fox")
            await harness.control.stop()
            for _ in range(2):
                answer = (await harness.chat()).json()
                assert answer["choices"][0]["message"]["content"] == "the fox"
            assert (await harness.http.get("/readyz")).status_code == 200

    asyncio.run(scenario())


def test_a_stopping_gateway_ends_what_is_running_with_an_error_and_tells_the_workers(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[300] * 9, pause_after=3)) as harness:
            worker = harness.workers[0]
            stream = asyncio.create_task(harness.chat(stream=True))
            whole = asyncio.create_task(harness.chat())
            await eventually(lambda: len(worker.running) == 2)
            await harness.gateway.stop()
            found = events((await stream).text)
            assert found[-1]["error"]["code"] == "unavailable"
            assert (await whole).status_code == 503
            await eventually(harness.idle)
            await harness.gateway.stop()
            with pytest.raises(httpx.ConnectError):
                await harness.http.get("/healthz")

    asyncio.run(scenario())


def test_a_stopping_gateway_lets_requests_end_within_its_grace(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(pause_after=3), stop_grace_s=20.0) as harness:
            worker = harness.workers[0]
            worker.script.output = harness.tokenizer.encode("the quick brown fox jumps")
            response = asyncio.create_task(harness.chat(stream=True))
            await eventually(lambda: worker.running)
            stopping = asyncio.create_task(harness.gateway.stop())
            await eventually(lambda: harness.gateway._stopping)
            worker.script.pause_after = None
            assert events((await response).text)[-1] == "[DONE]"
            await stopping

    asyncio.run(scenario())


def test_more_requests_than_the_gateway_takes_are_refused(model_folder: Path):
    async def scenario() -> None:
        limits = LimitsConfig(max_open_requests=1)
        async with serving(model_folder, Script(output=[300], pause_after=0), limits=limits) as harness:
            first = asyncio.create_task(harness.chat())
            await eventually(lambda: harness.workers[0].running)
            assert (await harness.chat()).status_code == 429
            harness.workers[0].script.pause_after = None
            assert (await first).status_code == 200
            assert (await harness.chat()).status_code == 200

    asyncio.run(scenario())


def test_a_view_that_is_behind_does_not_send_requests_to_a_successor(model_folder: Path):
    """The worker restarted on its port; until the view names the new process, nobody knows what that one serves."""

    async def scenario() -> None:
        placement = PlacementConfig(placement_timeout_s=0.2)
        async with serving(model_folder, Script(), placement=placement) as harness:
            worker = harness.workers[0]
            known = worker.state()
            await worker.die()
            successor = ScriptedWorker(worker.node_id, Script(output=[300]))
            await successor.start(port=int(known.node.address.rpartition(":")[2]))
            assert (await harness.chat()).status_code == 503
            assert successor.starts == []
            harness.control.show(successor.state())
            await eventually(lambda: harness.gateway._view.nodes["decode-0"].peer.incarnation == successor.incarnation)
            assert (await harness.chat()).status_code == 200
            await successor.die()

    asyncio.run(scenario())


def config(folder: Path, control_address: str, **fields) -> GatewayConfig:
    node = NodeConfig(node_id="gateway-0", control_address=control_address)
    ports = {"http_port": 0, "grpc_port": 0}
    return GatewayConfig(node=node, **({"models": (source(folder),)} | ports | fields))


def test_a_gateway_that_cannot_start_says_why_and_leaves_nothing_running(model_folder: Path, tmp_path: Path):
    async def scenario() -> None:
        control = ScriptedControl()
        await control.start()
        try:
            with listen("127.0.0.1", 0) as taken:
                port = taken.getsockname()[1]
                for field in ("http_port", "grpc_port"):
                    with pytest.raises(OSError, match=r"in use|cannot listen"):
                        await Gateway(config(model_folder, control.address, **{field: port})).start()
            with pytest.raises(BrokenCheckpoint):
                await Gateway(config(tmp_path, control.address)).start()
            assert control.registered == []
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))  # and never listens
                nobody = f"127.0.0.1:{unused.getsockname()[1]}"
                with pytest.raises(TimeoutError):
                    await Gateway(config(model_folder, nobody, register_timeout_s=0.2)).start()
        finally:
            await control.stop()
        assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}

    asyncio.run(scenario())


def test_a_gateway_that_can_no_longer_serve_says_why_so_that_it_is_replaced(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            ended = asyncio.create_task(harness.gateway.wait_ended())
            (task,) = [task for task in asyncio.all_tasks() if task.get_name().startswith("http on ")]
            task.cancel()
            assert (await ended).startswith(f"http on {harness.gateway.http_address}")
        async with serving(model_folder, Script()) as harness:
            ended = asyncio.create_task(harness.gateway.wait_ended())
            await harness.gateway.stop()
            assert await ended == "stopped"

    asyncio.run(scenario())


def test_a_stop_before_a_start_and_a_second_one_do_nothing(model_folder: Path):
    async def scenario() -> None:
        gateway = Gateway(config(model_folder, "127.0.0.1:1"))
        await gateway.stop()
        await gateway.stop()

    asyncio.run(scenario())


def test_nonsense_in_the_config_is_refused(model_folder: Path):
    with pytest.raises(ValueError, match="different names"):
        config(model_folder, "x:1", models=(source(model_folder), source(model_folder)))
    with pytest.raises(ValueError, match="at least one"):
        config(model_folder, "x:1", models=())
    with pytest.raises(ValueError, match="http_port"):
        config(model_folder, "x:1", http_port=70_000)
    with pytest.raises(ValueError, match="max_body_bytes"):
        LimitsConfig(max_body_bytes=0)
    with pytest.raises(ValueError, match="admission_timeout_s"):
        PlacementConfig(admission_timeout_s=0)


def test_listening_sockets_name_their_protocol_so_that_events_are_not_held_back():
    """asyncio leaves Nagle's algorithm on where they do not: answers on a kept-alive connection took 40 ms longer."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_gateway_loads_no_torch():
    program = "import cluster.gateway.gateway, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
