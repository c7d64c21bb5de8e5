"""Clients that leave: whatever was being done for them stops, at once and everywhere."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cluster.gateway import PlacementConfig
from tests.cluster.gateway.harness import Harness, serving
from tests.cluster.gateway.peers import MODEL, Script, eventually


async def send(harness: Harness, **fields) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A chat request on a bare connection, so that a test decides when it ends."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]} | fields
    content = json.dumps(body).encode()
    host, _, port = harness.gateway.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass


async def is_cancelled_everywhere(harness: Harness) -> None:
    worker = harness.workers[0]
    await eventually(lambda: len(worker.cancelled) == len(worker.starts) > 0)
    assert harness.idle()
    assert worker.cancelled == [(start.request_id, start.attempt) for start in worker.starts]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_a_client_that_leaves_is_cancelled_before_and_after_its_first_token(
    model_folder: Path, is_streamed: bool, num_tokens: int
):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[300] * 50, pause_after=num_tokens)) as harness:
            _, writer = await send(harness, stream=is_streamed)
            worker = harness.workers[0]
            await eventually(lambda: worker.running and worker.sent >= num_tokens)
            await hang_up(writer)
            await is_cancelled_everywhere(harness)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_before_its_request_was_accepted_is_cancelled_too(model_folder: Path, is_streamed: bool):
    async def scenario() -> None:
        async with serving(model_folder, Script(answer="silence")) as harness:
            _, writer = await send(harness, stream=is_streamed)
            await eventually(lambda: harness.workers[0].running)
            await hang_up(writer)
            await is_cancelled_everywhere(harness)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_while_no_worker_is_there_is_forgotten(model_folder: Path, is_streamed: bool):
    async def scenario() -> None:
        async with serving(model_folder) as harness:
            _, writer = await send(harness, stream=is_streamed)
            await eventually(lambda: harness.control.loads[-1].waiting == 1)
            await hang_up(writer)
            await eventually(lambda: harness.control.loads[-1].waiting == 0)

    asyncio.run(scenario())


def test_a_client_that_leaves_between_two_attempts_gets_no_third(model_folder: Path):
    async def scenario() -> None:
        placement = PlacementConfig(max_fruitless_attempts=1000)
        async with serving(
            model_folder, Script(output=[300], fail_after=(0, "ABORTED")), placement=placement
        ) as harness:
            worker = harness.workers[0]
            _, writer = await send(harness, stream=True)
            await eventually(lambda: len(worker.starts) >= 2)
            await hang_up(writer)
            await eventually(lambda: harness.control.loads[-1].running + harness.control.loads[-1].waiting == 0)
            num_starts = len(worker.starts)
            await harness.http.get("/healthz")
            assert len(worker.starts) == num_starts

    asyncio.run(scenario())


def test_a_stop_string_cancels_the_attempt_even_if_the_client_stays(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(pause_after=3)) as harness:
            harness.workers[0].script.output = harness.tokenizer.encode("the quick brown fox jumps")
            await harness.chat(stop=" brown")
            await is_cancelled_everywhere(harness)

    asyncio.run(scenario())


def test_forty_clients_that_leave_at_different_instants_leave_nothing_behind(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[300] * 200)) as harness:

            async def visit(index: int) -> None:
                reader, writer = await send(harness, stream=index % 2 == 0)
                async with asyncio.timeout(0.002 * index) as patience:
                    try:
                        await reader.read()
                    except asyncio.CancelledError:
                        if not patience.expired():
                            raise
                await hang_up(writer)

            results = await asyncio.gather(*[visit(index) for index in range(40)], return_exceptions=True)
            assert all(result is None or isinstance(result, TimeoutError) for result in results)
            await eventually(harness.idle)
            await eventually(lambda: harness.control.loads[-1].running + harness.control.loads[-1].waiting == 0)
            harness.workers[0].script.output = harness.tokenizer.encode("the fox")
            answer = await harness.chat()
            assert answer.json()["choices"][0]["message"]["content"] == "the fox"

    asyncio.run(scenario())
