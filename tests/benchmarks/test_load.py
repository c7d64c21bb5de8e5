"""The closed loop and the cancels, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from benchmarks.cancel import measure_cancels
from benchmarks.errors import BenchmarkError, LoadError
from benchmarks.load import Target, closed_loop, open_client
from benchmarks.load_reports import ReportReader
from benchmarks.prompts import Prompt
from tests.benchmarks.server import ScriptedServer

T = TypeVar("T")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"prompt number {index}", (1, 2, 3)) for index in range(count)]


def against(server: ScriptedServer, work: Callable[[ScriptedServer], Awaitable[T]]) -> T:
    async def run() -> T:
        async with server:
            return await work(server)

    return asyncio.run(run())


def target(server: ScriptedServer) -> Target:
    return Target(url=server.url, model="a-model")


async def loop(server: ScriptedServer, rounds: list[list[Prompt]]):
    async with open_client(target(server)) as client:
        return await closed_loop(client, "a-model", rounds, 4)


def test_every_prompt_is_answered_once_and_timed():
    server = ScriptedServer()
    turn = against(server, lambda server: loop(server, [prompts(3), prompts(3)]))
    assert sorted(server.prompts) == sorted(prompt.text for prompt in prompts(3) * 2)
    assert [request.output_tokens for request in turn.requests] == [4] * 6
    assert all(request.sent_s < request.first_token_s <= request.ended_s for request in turn.requests)
    assert turn.driver_cores > 0


def test_a_stream_sends_its_next_request_when_its_last_one_has_ended():
    turn = against(ScriptedServer(token_s=0.001), lambda server: loop(server, [prompts(2), prompts(2)]))
    first, second, *_ = turn.requests
    assert first.ended_s <= second.sent_s


@pytest.mark.parametrize("usage", [{"completion_tokens": 3}, {"prompt_tokens": 4}])
def test_an_answer_of_another_length_is_an_error_and_no_measurement(usage):
    server = ScriptedServer()
    server.usage = usage
    with pytest.raises(LoadError, match="asked for 3 tokens in and 4 out"):
        against(server, lambda server: loop(server, [prompts(1)]))


def test_a_refusal_ends_the_turn_with_the_servers_words():
    server = ScriptedServer()
    server.refusal = {"error": {"message": "no such model"}}
    with pytest.raises(LoadError, match="no such model"):
        against(server, lambda server: loop(server, [prompts(2)]))


def test_cached_tokens_that_the_server_counts_are_kept():
    server = ScriptedServer()
    server.usage = {"prompt_tokens_details": {"cached_tokens": 2}}  # type: ignore[dict-item]
    turn = against(server, lambda server: loop(server, [prompts(1)]))
    assert turn.requests[0].cached_tokens == 2


def test_cancelled_requests_leave_and_their_pages_come_back():
    server = ScriptedServer(token_s=0.01)
    times = against(
        server, lambda server: measure_cancels(target(server), server.control, prompts(8), output_tokens=5, seed=0)
    )
    assert len(times.after_first_token_s) + len(times.at_random_s) + times.num_over == 6
    assert server.num_left >= len(times.after_first_token_s) > 0
    assert min(times.after_first_token_s) > 0
    assert times.num_holding > 0


def test_pages_that_do_not_come_back_are_an_error_that_names_the_worker():
    server = ScriptedServer(token_s=0.01, leak=True)

    async def cancel(server: ScriptedServer) -> None:
        await measure_cancels(target(server), server.control, prompts(3), output_tokens=5, seed=0, free_deadline_s=0.5)

    with pytest.raises(BenchmarkError, match=r"decode-0.*pages_free=97"):
        against(server, cancel)


def test_a_control_plane_that_is_not_there_is_an_error():
    async def read() -> None:
        async with ReportReader("127.0.0.1:9"):
            pass

    with pytest.raises(BenchmarkError, match="UNAVAILABLE"):
        asyncio.run(read())


def test_a_control_plane_that_goes_away_fails_whoever_waits():
    async def read(server: ScriptedServer) -> None:
        async with ReportReader(server.control) as reports:
            await server.__aexit__()
            while True:
                await reports.next()

    async def run() -> None:
        await read(await ScriptedServer().__aenter__())

    with pytest.raises(BenchmarkError, match="control plane"):
        asyncio.run(run())
