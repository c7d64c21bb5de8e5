"""Attempts: rejected, lost and failed ones, and the text that goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from cluster.gateway import PlacementConfig
from tests.cluster.gateway.harness import Harness, events, serving
from tests.cluster.gateway.peers import MODEL, Script, ScriptedWorker, eventually

TEXT = "the quick brown fox jumps over the 漢字 and the lazy dog"


def both_say(harness: Harness, text: str = TEXT) -> list[int]:
    """All workers serve the same model."""
    token_ids = harness.tokenizer.encode(text)
    for worker in harness.workers:
        worker.script.output = token_ids
    return token_ids


def serving_worker(harness: Harness) -> ScriptedWorker:
    (worker,) = [worker for worker in harness.workers if worker.running]
    return worker


async def streamed(harness: Harness, at_tokens: int, disturb, **fields) -> list:
    """The events of a stream, in the middle of which `disturb` was called with the worker that serves it."""
    for worker in harness.workers:
        worker.script.pause_after = at_tokens
    response = asyncio.create_task(harness.chat(stream=True, **fields))
    await eventually(lambda: any(worker.sent >= at_tokens and worker.running for worker in harness.workers))
    first = serving_worker(harness)
    for worker in harness.workers:
        if worker is not first:
            worker.script.pause_after = None
    await disturb(first)
    return events((await response).text)


def text_of(found: list) -> str:
    return "".join(event["choices"][0]["delta"].get("content", "") for event in found if event != "[DONE]")


@pytest.mark.parametrize("at_tokens", [0, 1, 7, 12])
def test_the_text_goes_on_after_its_worker_was_killed(model_folder: Path, at_tokens: int):
    async def scenario() -> None:
        async with serving(model_folder, Script(), Script()) as harness:
            token_ids = both_say(harness)
            found = await streamed(harness, at_tokens, ScriptedWorker.die)
            assert (text_of(found), found[-1]) == (TEXT, "[DONE]")
            first, second = (start for worker in harness.workers for start in worker.starts)
            if first.attempt > second.attempt:
                first, second = second, first
            assert second.request_id == first.request_id
            assert second.num_prompt_tokens == first.num_prompt_tokens == len(first.token_ids)
            num_emitted = len(second.token_ids) - len(first.token_ids)
            assert num_emitted <= at_tokens
            assert list(second.token_ids) == [*first.token_ids, *token_ids[:num_emitted]]
            assert second.sampling == first.sampling

    asyncio.run(scenario())


def test_limits_and_usage_count_the_output_of_all_attempts(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(), Script()) as harness:
            token_ids = both_say(harness)
            found = await streamed(harness, 5, ScriptedWorker.die, max_tokens=9, stream_options={"include_usage": True})
            assert text_of(found[:-2]) == harness.tokenizer.decode(token_ids[:9])
            assert found[-3]["choices"][0]["finish_reason"] == "length"
            assert found[-2]["usage"]["completion_tokens"] == 9

    asyncio.run(scenario())


def test_a_stop_string_may_begin_in_one_attempt_and_end_in_the_next(model_folder: Path):
    async def scenario() -> None:
        script = Script()
        async with serving(model_folder, script) as harness:
            token_ids = both_say(harness)
            for num_before in range(1, len(token_ids)):
                script.fail_after = (num_before, "ABORTED")
                num_starts = len(harness.workers[0].starts)
                response = asyncio.create_task(harness.chat(stream=True, stop="fox jumps over the 漢"))
                await eventually(
                    lambda: response.done() or len(harness.workers[0].starts) >= num_starts + 2  # noqa: B023
                )
                script.fail_after = None
                found = events((await response).text)
                assert (text_of(found), found[-1]) == ("the quick brown ", "[DONE]")

    asyncio.run(scenario())


def test_a_worker_that_the_control_plane_calls_gone_is_left_at_once(model_folder: Path):
    """A frozen process keeps its connection; the control plane notices its silence."""

    async def scenario() -> None:
        async with serving(model_folder, Script(), Script()) as harness:
            both_say(harness)

            async def hide(worker: ScriptedWorker) -> None:
                harness.control.hide(worker.state())

            assert text_of(await streamed(harness, 4, hide)) == TEXT
            await eventually(harness.idle)

    asyncio.run(scenario())


@pytest.mark.parametrize("code", ["ABORTED", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_a_failed_attempt_is_made_again_with_what_it_gave(model_folder: Path, code: str):
    async def scenario() -> None:
        script = Script(fail_after=(6, code))
        async with serving(model_folder, script) as harness:
            token_ids = both_say(harness)
            response = asyncio.create_task(harness.chat(stream=True))
            await eventually(lambda: len(harness.workers[0].starts) >= 2)
            script.fail_after = None
            found = events((await response).text)
            assert text_of(found) == TEXT
            first, second = harness.workers[0].starts[:2]
            assert (first.attempt, second.attempt) == (1, 2)
            assert list(second.token_ids) == [*first.token_ids, *token_ids[:6]]

    asyncio.run(scenario())


def test_events_of_an_attempt_that_was_given_up_are_dropped_and_its_work_is_cancelled(model_folder: Path):
    async def scenario() -> None:
        placement = PlacementConfig(silence_timeout_s=0.3)
        async with serving(model_folder, Script(), Script(), placement=placement) as harness:
            both_say(harness)

            async def wait_until_given_up(worker: ScriptedWorker) -> None:
                await eventually(lambda: worker.cancelled)
                worker.script.pause_after = None  # wakes up, too late

            found = await streamed(harness, 4, wait_until_given_up)
            assert (text_of(found), found[-1]) == (TEXT, "[DONE]")

    asyncio.run(scenario())


def test_a_request_waits_for_its_worker_to_come_back(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            both_say(harness)

            async def restart(worker: ScriptedWorker) -> None:
                harness.control.hide(worker.state())
                await worker.die()
                successor = ScriptedWorker(worker.node_id, Script(output=worker.script.output))
                harness.workers.append(successor)
                await successor.start()
                harness.control.show(successor.state())

            found = await streamed(harness, 3, restart)
            assert (text_of(found), found[-1]) == (TEXT, "[DONE]")
            await harness.workers[1].die()

    asyncio.run(scenario())


def test_a_request_may_come_before_the_first_worker(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder) as harness:
            response = asyncio.create_task(harness.chat())
            worker = ScriptedWorker("decode-0", Script(output=harness.tokenizer.encode(TEXT)))
            await worker.start()
            harness.control.show(worker.state())
            assert (await response).json()["choices"][0]["message"]["content"] == TEXT
            await worker.die()

    asyncio.run(scenario())


def test_without_any_worker_the_client_is_told_to_come_back(model_folder: Path):
    async def scenario() -> None:
        placement = PlacementConfig(placement_timeout_s=0.1, retry_after_s=1.5)
        async with serving(model_folder, placement=placement) as harness:
            response = await harness.chat()
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "unavailable"
            assert response.headers["retry-after"] == "2"
            assert response.headers["retry-after-ms"] == "1500"
            with pytest.raises(openai.InternalServerError):
                await harness.with_openai(
                    lambda client: client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": "x"}]
                    )
                )

    asyncio.run(scenario())


def test_a_rejected_request_goes_to_the_next_worker(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(answer="reject"), Script()) as harness:
            both_say(harness)
            for _ in range(3):
                assert (await harness.chat()).json()["choices"][0]["message"]["content"] == TEXT
            assert len(harness.workers[1].starts) == 3
            assert harness.workers[0].starts

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", ["reject", "RESOURCE_EXHAUSTED"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_when_every_worker_is_full_the_client_gets_429_and_when_to_come_back(
    model_folder: Path, answer: str, is_streamed: bool
):
    async def scenario() -> None:
        async with serving(model_folder, Script(answer=answer), Script(answer=answer)) as harness:
            response = await harness.chat(stream=is_streamed)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.headers["retry-after-ms"] == "50"
            assert response.headers["content-type"] == "application/json"
            error = response.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("rate_limit_error", None, "overloaded")
            assert [len(worker.starts) for worker in harness.workers] == [1, 1]

    asyncio.run(scenario())


def test_the_official_client_comes_back_after_429_by_itself(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(answer="reject")) as harness:
            both_say(harness)
            worker = harness.workers[0]

            async def make_room() -> None:
                await eventually(lambda: worker.starts)
                worker.script.answer = "accept"

            async with asyncio.TaskGroup() as group:
                group.create_task(make_room())
                answer = await harness.with_openai(
                    lambda client: client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": "x"}]
                    ),
                    max_retries=20,
                )
            assert answer.choices[0].message.content == TEXT

    asyncio.run(scenario())


def test_a_request_that_no_worker_could_ever_hold_is_refused_for_good(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(answer="reject")) as harness:
            worker = harness.workers[0]
            worker.pages_total = 9  # the script says that ten are needed
            harness.control.show(worker.state())
            await eventually(lambda: harness.gateway._view.nodes["decode-0"].load.pages_total == 9)
            response = await harness.chat()
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"

    asyncio.run(scenario())


def test_a_client_that_has_seen_tokens_is_not_sent_away_but_waits_for_room(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(), Script()) as harness:
            both_say(harness)

            async def die_while_the_other_is_full(worker: ScriptedWorker) -> None:
                (other,) = [candidate for candidate in harness.workers if candidate is not worker]
                other.script.answer = "reject"
                await worker.die()
                await eventually(lambda: len(other.starts) >= 2)
                other.script.answer = "accept"

            found = await streamed(harness, 3, die_while_the_other_is_full)
            assert (text_of(found), found[-1]) == (TEXT, "[DONE]")

    asyncio.run(scenario())


def test_a_worker_that_does_not_answer_is_passed_over_and_its_attempt_cancelled(model_folder: Path):
    async def scenario() -> None:
        placement = PlacementConfig(admission_timeout_s=0.2)
        async with serving(model_folder, Script(answer="silence"), Script(), placement=placement) as harness:
            both_say(harness)
            for _ in range(2):
                assert (await harness.chat()).json()["choices"][0]["message"]["content"] == TEXT
            silent = harness.workers[0]
            await eventually(lambda: len(silent.cancelled) == len(silent.starts) > 0)

    asyncio.run(scenario())


def test_what_a_worker_calls_invalid_is_the_clients_fault(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(answer="INVALID"), Script(answer="INVALID")) as harness:
            response = await harness.chat()
            assert response.status_code == 400
            assert response.json()["error"]["message"] == "scripted INVALID"
            assert sum(len(worker.starts) for worker in harness.workers) == 1

    asyncio.run(scenario())


def test_a_request_that_keeps_failing_ends_with_500_and_is_not_to_be_tried_again(model_folder: Path):
    async def scenario() -> None:
        placement = PlacementConfig(max_internal_failures=2)
        async with serving(model_folder, Script(fail_after=(0, "INTERNAL")), placement=placement) as harness:
            both_say(harness)
            response = await harness.chat()
            assert response.status_code == 500
            assert response.headers["x-should-retry"] == "false"
            assert response.json()["error"]["type"] == "server_error"
            assert len(harness.workers[0].starts) == 3

    asyncio.run(scenario())


def test_a_request_that_kills_its_workers_does_not_kill_them_all(model_folder: Path):
    async def scenario() -> None:
        placement = PlacementConfig(max_lost_workers=1)
        async with serving(model_folder, *[Script(pause_after=0) for _ in range(4)], placement=placement) as harness:
            both_say(harness)
            response = asyncio.create_task(harness.chat())
            for _ in range(2):
                await eventually(lambda: not harness.idle())
                await serving_worker(harness).die()
                await eventually(harness.idle)
            assert (await response).status_code == 500
            assert sum(len(worker.starts) for worker in harness.workers) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("code", ["INTERNAL", "INVALID"])
def test_a_stream_that_cannot_be_finished_ends_with_an_error_and_never_neatly(model_folder: Path, code: str):
    async def scenario() -> None:
        placement = PlacementConfig(max_internal_failures=0)
        async with serving(model_folder, Script(fail_after=(4, code)), placement=placement) as harness:
            both_say(harness)
            response = await harness.chat(stream=True)
            assert response.status_code == 200
            found = events(response.text)
            assert "[DONE]" not in found
            assert set(found[-1]) == {"error"}
            assert not any(event["choices"][0]["finish_reason"] for event in found[:-1])
            assert text_of(found[:-1])
            assert TEXT.startswith(text_of(found[:-1]))

            def consume(client: openai.OpenAI) -> None:
                messages = [{"role": "user", "content": "x"}]
                for _ in client.chat.completions.create(model=MODEL, messages=messages, stream=True):
                    pass

            with pytest.raises(openai.APIError):
                await harness.with_openai(consume)

    asyncio.run(scenario())


def test_the_streams_of_two_workers_do_not_mix(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(), Script()) as harness:
            texts = ["the quick brown fox", "the lazy dog and the river"]
            for worker, text in zip(harness.workers, texts, strict=True):
                worker.script.output = harness.tokenizer.encode(text)
            answers = await asyncio.gather(*[harness.chat(stream=True) for _ in range(20)])
            got = [text_of(events(answer.text)) for answer in answers]
            assert set(got) == set(texts)
            assert len({start.request_id for worker in harness.workers for start in worker.starts}) == 20
            assert [len(worker.gateways) for worker in harness.workers] == [1, 1], "one session per worker"

    asyncio.run(scenario())
