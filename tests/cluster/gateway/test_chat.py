"""Chat completions, streamed and whole, through the official client and byte by byte."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from openai import OpenAI

from cluster.gateway import LimitsConfig
from tests.cluster.gateway.harness import Harness, events, serving
from tests.cluster.gateway.peers import MODEL, Script, eventually

TEXT = "the quick brown fox jumps over the lazy dog"
MESSAGES = [{"role": "user", "content": "hello"}]


def says(harness: Harness, text: str) -> list[int]:
    """Makes the first worker's model say `text`. Returns its tokens."""
    token_ids = harness.tokenizer.encode(text)
    harness.workers[0].script.output = token_ids
    return token_ids


def test_a_whole_answer_has_text_finish_reason_and_usage(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(cached_tokens=3)) as harness:
            token_ids = says(harness, TEXT)
            answer = await harness.with_openai(
                lambda client: client.chat.completions.create(model=MODEL, messages=MESSAGES)
            )
            assert answer.object == "chat.completion"
            assert answer.model == MODEL
            assert answer.id.startswith(f"chatcmpl-{harness.gateway.incarnation}-")
            choice = answer.choices[0]
            assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", TEXT)
            assert choice.finish_reason == "stop"
            assert choice.logprobs is None
            start = harness.workers[0].starts[0]
            assert answer.usage.prompt_tokens == len(start.token_ids) == start.num_prompt_tokens
            assert answer.usage.completion_tokens == len(token_ids)
            assert answer.usage.total_tokens == len(start.token_ids) + len(token_ids)
            assert answer.usage.prompt_tokens_details.cached_tokens == 3

    asyncio.run(scenario())


def test_the_chat_template_is_applied_and_the_prompt_asks_for_the_assistant(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[])) as harness:
            messages = [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
            ]
            response = await harness.chat(messages=messages)
            assert response.status_code == 200, response.text
            prompt = list(harness.workers[0].starts[0].token_ids)
            assert prompt == harness.tokenizer.encode_chat(
                [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
            )
            assert harness.tokenizer.decode(prompt).rstrip().endswith("assistant")

    asyncio.run(scenario())


def test_a_streamed_answer_is_the_same_text_in_pieces(model_folder: Path):
    def stream(client: OpenAI) -> list:
        options = {"include_usage": True}
        return list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options=options))

    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            token_ids = says(harness, TEXT)
            first, *chunks, last, usage = await harness.with_openai(stream)
            assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
            assert "".join(chunk.choices[0].delta.content for chunk in chunks) == TEXT
            assert all(chunk.choices[0].finish_reason is None for chunk in (first, *chunks))
            assert last.choices[0].finish_reason == "stop"
            assert last.choices[0].delta.content is None
            assert usage.choices == []
            assert usage.usage.completion_tokens == len(token_ids)
            assert len({chunk.id for chunk in (first, *chunks, last, usage)}) == 1

    asyncio.run(scenario())


def test_the_stream_is_server_sent_events_that_end_with_done(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            says(harness, TEXT)
            response = await harness.chat(stream=True)
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["x-request-id"].startswith(harness.gateway.incarnation)
            assert response.text.endswith("data: [DONE]\n\n")
            found = events(response.text)
            assert found[-1] == "[DONE]"
            assert {event["object"] for event in found[:-1]} == {"chat.completion.chunk"}
            assert all("usage" not in event for event in found[:-1])
            assert found[0]["choices"][0] == {
                "index": 0,
                "delta": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
            assert found[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}

    asyncio.run(scenario())


def test_with_usage_asked_for_every_other_event_says_null(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            says(harness, TEXT)
            response = await harness.chat(stream=True, stream_options={"include_usage": True})
            *others, usage, done = events(response.text)
            assert done == "[DONE]"
            assert all(event["usage"] is None for event in others)
            assert usage["usage"]["completion_tokens"] > 0

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "👩‍👩‍👧 and 🏳️‍🌈", "mixed 漢字 and latin"])
def test_characters_that_are_split_over_tokens_arrive_whole(model_folder: Path, text: str):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            token_ids = says(harness, text)
            assert len(token_ids) > len(text)
            response = await harness.chat(stream=True)
            pieces = [event["choices"][0]["delta"].get("content", "") for event in events(response.text)[:-1]]
            assert "".join(pieces) == text
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)

    asyncio.run(scenario())


@pytest.mark.parametrize("tokens_per_message", [1, 3, 100])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_ends_the_answer_before_it_and_the_worker_is_told(
    model_folder: Path, tokens_per_message: int, is_streamed: bool
):
    async def scenario() -> None:
        # The worker pauses before its end, so that only the stop string can have ended the answer.
        script = Script(tokens_per_message=tokens_per_message)
        async with serving(model_folder, script) as harness:
            token_ids = says(harness, TEXT)
            script.pause_after = len(token_ids) - 1
            response = await harness.chat(stop=["nothing", "mps ov"], stream=is_streamed)
            if is_streamed:
                found = events(response.text)[:-1]
                text = "".join(event["choices"][0]["delta"].get("content", "") for event in found)
                finish_reason = found[-1]["choices"][0]["finish_reason"]
            else:
                choice = response.json()["choices"][0]
                text, finish_reason = choice["message"]["content"], choice["finish_reason"]
            assert (text, finish_reason) == ("the quick brown fox ju", "stop")
            await eventually(lambda: harness.workers[0].cancelled)

    asyncio.run(scenario())


def test_the_usage_after_a_stop_string_does_not_depend_on_how_tokens_were_batched(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            says(harness, TEXT)
            counts = set()
            for batch in (1, 2, 100):
                harness.workers[0].script.tokens_per_message = batch
                answer = (await harness.chat(stop="fox")).json()
                assert answer["choices"][0]["message"]["content"] == "the quick brown "
                counts.add(answer["usage"]["completion_tokens"])
            assert len(counts) == 1

    asyncio.run(scenario())


def test_max_tokens_ends_the_answer_with_length(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            token_ids = says(harness, TEXT)
            for field in ("max_tokens", "max_completion_tokens"):
                answer = (await harness.chat(**{field: 4})).json()
                assert answer["choices"][0]["finish_reason"] == "length"
                assert answer["choices"][0]["message"]["content"] == harness.tokenizer.decode(token_ids[:4])
                assert answer["usage"]["completion_tokens"] == 4
            assert [start.sampling.max_tokens for start in harness.workers[0].starts] == [4, 4]

    asyncio.run(scenario())


def test_without_max_tokens_the_worker_is_given_no_limit(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[])) as harness:
            await harness.chat()
            assert harness.workers[0].starts[0].sampling.max_tokens == 0

    asyncio.run(scenario())


def test_sampling_fields_reach_the_worker(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[])) as harness:
            response = await harness.chat(
                temperature=0.5,
                top_p=0.25,
                top_k=7,
                min_p=0.125,
                repetition_penalty=1.5,
                presence_penalty=-0.5,
                frequency_penalty=0.75,
                seed=-1,
                logit_bias={"5": -100, "6": 2.5},
                ignore_eos=True,
                user="somebody",
                unknown_field={"is": "tolerated"},
            )
            assert response.status_code == 200, response.text
            sampling = harness.workers[0].starts[0].sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
            assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, -0.5)
            assert sampling.frequency_penalty == 0.75
            assert sampling.seed == 2**64 - 1
            assert dict(sampling.logit_bias) == {5: -100, 6: 2.5}
            assert sampling.ignore_eos
            assert sampling.top_logprobs == -1

    asyncio.run(scenario())


@pytest.mark.parametrize("top_p", [0, 1e-46, 1e-40])
def test_a_top_p_of_zero_or_next_to_it_reaches_the_worker_as_a_positive_number(model_folder: Path, top_p: float):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[])) as harness:
            response = await harness.chat(top_p=top_p)
            assert response.status_code == 200, response.text
            assert 0 < harness.workers[0].starts[0].sampling.top_p < 1e-37

    asyncio.run(scenario())


def test_what_a_client_leaves_out_or_null_is_openais_default_and_every_request_has_a_seed(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[])) as harness:
            for _ in range(2):
                response = await harness.chat(temperature=None, stop=None, n=1, tools=[], top_k=-1, seed=None)
                assert response.status_code == 200, response.text
            first, second = (start.sampling for start in harness.workers[0].starts)
            assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (1, 1, 0, 1)
            assert first.seed != second.seed

    asyncio.run(scenario())


def test_log_probabilities_come_with_the_tokens_text_and_bytes(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            token_ids = says(harness, "the é")
            answer = await harness.with_openai(
                lambda client: client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2
                )
            )
            content = answer.choices[0].logprobs.content
            assert b"".join(bytes(entry.bytes) for entry in content) == "the é".encode()
            assert [entry.logprob for entry in content] == [-0.5] * len(token_ids)
            assert [[alternative.logprob for alternative in entry.top_logprobs] for entry in content] == (
                [[-1.0, -2.0]] * len(token_ids)
            )
            assert content[0].token == "the"
            assert content[0].top_logprobs[0].bytes == content[0].bytes

    asyncio.run(scenario())


def test_streamed_log_probabilities_are_those_of_the_text_that_was_shown(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            says(harness, TEXT)
            response = await harness.chat(stream=True, logprobs=True, stop="brown")
            found = events(response.text)[:-1]
            choices = [event["choices"][0] for event in found]
            assert all(choice["logprobs"] is None or choice["logprobs"]["content"] for choice in choices)
            entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert all(entry["top_logprobs"] == [] for entry in entries)
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            assert text == "the quick "
            assert b"".join(bytes(entry["bytes"]) for entry in entries).decode().startswith("the quick")

    asyncio.run(scenario())


def test_a_silent_stream_is_kept_open_by_comments(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(pause_after=2), keep_alive_s=0.02) as harness:
            says(harness, TEXT)
            body = {"model": MODEL, "messages": MESSAGES, "stream": True}
            text = ""
            async with harness.http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for piece in response.aiter_text():
                    text += piece
                    if text.count(": keep-alive\n\n") == 3:
                        harness.workers[0].script.pause_after = None
            found = events(text)
            assert found[-1] == "[DONE]"
            assert "".join(event["choices"][0]["delta"].get("content", "") for event in found[:-1]) == TEXT

    asyncio.run(scenario())


def test_a_long_prompt_is_tokenised_off_the_event_loop_with_the_same_result(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[]), limits=LimitsConfig(off_loop_chars=0)) as harness:
            await harness.chat()
            prompt = harness.tokenizer.encode_chat(MESSAGES)
            assert list(harness.workers[0].starts[0].token_ids) == prompt

    asyncio.run(scenario())
