"""`headrace.v1.InferenceService`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from protos.serving import connect
from tests.cluster.gateway.conftest import CONTEXT_TOKENS
from tests.cluster.gateway.harness import Harness, serving
from tests.cluster.gateway.peers import MODEL, Script, eventually

TEXT = "the quick brown fox jumps over the 漢字"
SERVICE = "headrace.v1.InferenceService"


@asynccontextmanager
async def calling(
    folder: Path, *scripts: Script, **config: Any
) -> AsyncIterator[tuple[Harness, inference_pb2_grpc.InferenceServiceStub]]:
    async with serving(folder, *scripts, **config) as harness, connect(harness.gateway.address) as channel:
        yield harness, inference_pb2_grpc.InferenceServiceStub(channel)


async def generate(
    stub: inference_pb2_grpc.InferenceServiceStub, **fields: Any
) -> list[inference_pb2.GenerateResponse]:
    request = inference_pb2.GenerateRequest(**({"model": MODEL} | fields))
    call = stub.Generate(request, timeout=30)
    try:
        return [response async for response in call]
    finally:
        call.cancel()


def chat(*messages: tuple[str, str]) -> inference_pb2.ChatMessages:
    return inference_pb2.ChatMessages(
        messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )


@pytest.mark.parametrize("kind", ["text", "token_ids", "chat"])
def test_every_kind_of_prompt_streams_text_and_tokens_and_ends_with_the_usage(model_folder: Path, kind: str):
    async def scenario() -> None:
        async with calling(model_folder, Script(cached_tokens=1)) as (harness, stub):
            token_ids = harness.tokenizer.encode(TEXT)
            harness.workers[0].script.output = token_ids
            expected = harness.tokenizer.encode("hello")
            prompt: Any = "hello"
            if kind == "token_ids":
                prompt = inference_pb2.TokenIds(token_ids=expected)
            elif kind == "chat":
                prompt = chat(("user", "hello"))
                expected = harness.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
            responses = await generate(stub, **{kind: prompt})
            assert "".join(response.text for response in responses) == TEXT
            assert [token_id for response in responses for token_id in response.token_ids] == token_ids
            assert [response.finish_reason for response in responses[:-1]] == [""] * (len(responses) - 1)
            last = responses[-1]
            assert last.finish_reason == "stop"
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(expected), len(token_ids))
            assert last.usage.cached_tokens == 1
            assert list(harness.workers[0].starts[0].token_ids) == expected
            assert {response.request_id for response in responses} == {harness.workers[0].starts[0].request_id}

    asyncio.run(scenario())


def test_log_probabilities_and_stop_strings(model_folder: Path):
    async def scenario() -> None:
        async with calling(model_folder, Script()) as (harness, stub):
            harness.workers[0].script.output = harness.tokenizer.encode(TEXT)
            responses = await generate(stub, text="x", top_logprobs=1, stop=["nothing", "wn fox"], temperature=0)
            assert "".join(response.text for response in responses) == "the quick bro"
            for response in responses:
                assert len(response.logprobs) == len(response.token_ids)
                for token_id, logprobs in zip(response.token_ids, response.logprobs, strict=True):
                    assert logprobs.logprob == -0.5
                    assert [top.token_id for top in logprobs.top] == [token_id]
            assert responses[-1].finish_reason == "stop"

    asyncio.run(scenario())


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"text": ""}, "text"),
    ({}, "prompt"),
    ({"token_ids": inference_pb2.TokenIds()}, "token_ids"),
    ({"token_ids": inference_pb2.TokenIds(token_ids=[99_999])}, "token_ids"),
    ({"chat": chat()}, "chat.messages"),
    ({"chat": chat(("user", "a"), ("robot", "b"))}, "chat.messages[1].role"),
    ({"chat": chat(("user", "refuse me"))}, "messages"),
    ({"text": "x", "max_tokens": 0}, "max_tokens"),
    ({"text": "x", "max_tokens": CONTEXT_TOKENS}, "max_tokens"),
    ({"text": "the " * CONTEXT_TOKENS}, "text"),
    ({"text": "x", "temperature": -1}, "temperature"),
    ({"text": "x", "temperature": math.nan}, "temperature"),
    ({"text": "x", "temperature": math.inf}, "temperature"),
    ({"text": "x", "top_p": 1.5}, "top_p"),
    ({"text": "x", "min_p": -0.5}, "min_p"),
    ({"text": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"text": "x", "repetition_penalty": 1e-46}, "repetition_penalty"),
    ({"text": "x", "presence_penalty": 5}, "presence_penalty"),
    ({"text": "x", "frequency_penalty": -5}, "frequency_penalty"),
    ({"text": "x", "logit_bias": {99_999: 1.0}}, "logit_bias"),
    ({"text": "x", "logit_bias": {5: 200.0}}, "logit_bias"),
    ({"text": "x", "logit_bias": {5: math.nan}}, "logit_bias"),
    ({"text": "x", "stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"text": "x", "stop": [""]}, "stop[0]"),
    ({"text": "x", "top_logprobs": 21}, "top_logprobs"),
]


def test_bad_requests_are_invalid_arguments_and_name_the_field_before_any_worker_hears_of_them(model_folder: Path):
    async def scenario() -> None:
        async with calling(model_folder, Script()) as (harness, stub):
            for fields, param in INVALID:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await generate(stub, **fields)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (fields, caught.value)
                assert caught.value.details().startswith(f"{param}"), (fields, caught.value.details())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, model="gpt-9", text="x")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert harness.workers[0].starts == []

    asyncio.run(scenario())


def test_overload_is_resource_exhausted_and_says_when_to_come_back(model_folder: Path):
    async def scenario() -> None:
        async with calling(model_folder, Script(answer="reject")) as (_, stub):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, text="x")
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "50"

    asyncio.run(scenario())


def test_a_stream_that_cannot_be_finished_ends_with_a_status(model_folder: Path):
    async def scenario() -> None:
        async with calling(model_folder, Script(output=[300] * 9, fail_after=(3, "INVALID"))) as (_, stub):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, text="x")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


@pytest.mark.parametrize("top_p", [0, 1e-46, 1e-40])
def test_a_top_p_of_zero_or_next_to_it_reaches_the_worker_as_a_positive_number(model_folder: Path, top_p: float):
    async def scenario() -> None:
        async with calling(model_folder, Script(output=[])) as (harness, stub):
            await generate(stub, text="x", top_p=top_p)
            assert 0 < harness.workers[0].starts[0].sampling.top_p < 1e-37

    asyncio.run(scenario())


def test_a_deadline_reaches_the_worker(model_folder: Path):
    async def scenario() -> None:
        async with calling(model_folder, Script(output=[300] * 9, pause_after=2)) as (harness, stub):
            call = stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text="x"), timeout=1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: len(harness.workers[0].cancelled) == 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", ["accept", "silence"])
def test_a_cancelled_call_reaches_the_worker(model_folder: Path, answer: str):
    async def scenario() -> None:
        async with calling(model_folder, Script(output=[300] * 9, pause_after=0, answer=answer)) as (harness, stub):
            call = stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text="x"), timeout=30)
            worker = harness.workers[0]
            await eventually(lambda: worker.running)
            call.cancel()
            await eventually(lambda: len(worker.cancelled) == 1)
            assert harness.idle()

    asyncio.run(scenario())


def test_models_are_listed_with_their_context(model_folder: Path):
    async def scenario() -> None:
        async with calling(model_folder, Script()) as (_, stub):
            response = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=30)
            assert [(model.name, model.context_tokens) for model in response.models] == [(MODEL, CONTEXT_TOKENS)]

    asyncio.run(scenario())


def test_health_follows_the_workers_and_reflection_lists_the_service(model_folder: Path):
    async def scenario() -> None:
        async with serving(model_folder, Script()) as harness, connect(harness.gateway.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def until(status: int) -> None:
                async with asyncio.timeout(20):
                    call = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
                    try:
                        async for response in call:
                            if response.status == status:
                                return
                    finally:
                        call.cancel()

            await until(health_pb2.HealthCheckResponse.SERVING)
            harness.control.hide(harness.workers[0].state())
            await until(health_pb2.HealthCheckResponse.NOT_SERVING)
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            try:
                response = await call.read()
                assert SERVICE in [service.name for service in response.list_services_response.service]
            finally:
                call.cancel()

    asyncio.run(scenario())
