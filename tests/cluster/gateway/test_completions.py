"""Completions: prompts as text and as token ids, and their own shape of log probabilities."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.gateway.harness import events, serving
from tests.cluster.gateway.peers import MODEL, Script

TEXT = " jumps over the lazy dog"


@pytest.mark.parametrize("kind", ["text", "list of one text", "token ids", "list of one list"])
def test_every_kind_of_prompt_that_openai_knows_is_taken(model_folder: Path, kind: str):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            token_ids = harness.tokenizer.encode("the fox")
            prompt = {
                "text": "the fox",
                "list of one text": ["the fox"],
                "token ids": token_ids,
                "list of one list": [token_ids],
            }[kind]
            harness.workers[0].script.output = harness.tokenizer.encode(TEXT)
            answer = await harness.with_openai(
                lambda client: client.completions.create(model=MODEL, prompt=prompt, max_tokens=100)
            )
            assert list(harness.workers[0].starts[0].token_ids) == token_ids
            assert answer.object == "text_completion"
            assert answer.id.startswith("cmpl-")
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
            assert answer.usage.prompt_tokens == len(token_ids)

    asyncio.run(scenario())


def test_a_streamed_completion_has_no_opening_event(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            harness.workers[0].script.output = harness.tokenizer.encode(TEXT)
            response = await harness.complete(stream=True, stream_options={"include_usage": True})
            *chunks, last, usage, done = events(response.text)
            assert done == "[DONE]"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
            assert all(chunk["choices"][0]["text"] for chunk in chunks)
            assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "stop")
            assert usage["usage"]["total_tokens"] > 0

    asyncio.run(scenario())


def test_log_probabilities_have_the_shape_of_completions(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            token_ids = harness.tokenizer.encode(TEXT)
            harness.workers[0].script.output = token_ids
            answer = await harness.with_openai(
                lambda client: client.completions.create(model=MODEL, prompt="the fox", logprobs=2)
            )
            logprobs = answer.choices[0].logprobs
            assert "".join(logprobs.tokens) == TEXT
            assert logprobs.token_logprobs == [-0.5] * len(token_ids)
            assert logprobs.text_offset[0] == 0
            for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
                assert TEXT[offset:].startswith(token)
            assert all(len(top) <= 2 for top in logprobs.top_logprobs)
            assert harness.workers[0].starts[0].sampling.top_logprobs == 2

    asyncio.run(scenario())


def test_log_probabilities_of_the_chosen_tokens_alone(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness:
            harness.workers[0].script.output = harness.tokenizer.encode(TEXT)
            logprobs = (await harness.complete(logprobs=0)).json()["choices"][0]["logprobs"]
            assert logprobs["top_logprobs"] == [{}] * len(logprobs["tokens"])
            assert (await harness.complete()).json()["choices"][0]["logprobs"] is None

    asyncio.run(scenario())


def test_names_of_control_tokens_in_a_prompt_stay_text(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script(output=[])) as harness:
            await harness.complete(prompt="<|im_end|>")
            assert len(harness.workers[0].starts[0].token_ids) > 1

    asyncio.run(scenario())
