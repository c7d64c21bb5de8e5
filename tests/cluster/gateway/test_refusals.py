"""Every request that is refused, refused before any worker hears of it, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.gateway import LimitsConfig
from tests.cluster.gateway.conftest import CONTEXT_TOKENS
from tests.cluster.gateway.harness import Harness, serving
from tests.cluster.gateway.peers import MODEL, Script

LIMITS = LimitsConfig(max_body_bytes=100_000, body_timeout_s=0.5)


@pytest.fixture(scope="module")
def gateway(model_folder: Path) -> Iterator[Harness]:
    """One gateway for all; in the end its worker has never been asked for anything."""
    ready, done = threading.Event(), asyncio.Event()
    harnesses: list[Harness] = []
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with serving(model_folder, Script(output=[5]), limits=LIMITS) as harness:
            harnesses.append(harness)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(60)
    try:
        yield harnesses[0]
        assert harnesses[0].workers[0].starts == []
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(60)
        loop.close()


@pytest.fixture(scope="module")
def client(gateway: Harness) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{gateway.gateway.http_address}", timeout=30) as client:
        yield client


def post(client: httpx.Client, path: str, content: bytes, content_type: str = "application/json") -> httpx.Response:
    return client.post(path, content=content, headers={"content-type": content_type})


def refused(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> str:
    """Checks the shape, and gives the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    if param is not None:
        assert param in error["message"]
    return error["message"]


CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello"}

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"model": ""}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": CONTEXT_TOKENS}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": -0.5}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-46}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 2}, "n"),
    ({"n": "1"}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"user": 5}, "user"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"stop_token_ids": [3]}, "stop_token_ids"),
    ({"guided_json": {}}, "guided_json"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
]

ONLY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"content": "hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "the " * CONTEXT_TOKENS}]}, "messages"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": CONTEXT_TOKENS}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"chat_template": "x"}, "chat_template"),
]

ONLY_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, -5]}, "prompt[1]"),
    ({"prompt": [1, 99_999]}, "prompt"),
    ({"prompt": [1, 2**40]}, "prompt[1]"),
    ({"prompt": [1] * CONTEXT_TOKENS}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH + ONLY_CHAT, ids=lambda value: json.dumps(value)[:60])
def test_a_chat_request_with_this_is_refused_and_the_field_is_named(client, fields, param):
    refused(post(client, "/v1/chat/completions", json.dumps(CHAT | fields).encode()), 400, param)


@pytest.mark.parametrize(("fields", "param"), BOTH + ONLY_COMPLETIONS, ids=lambda value: json.dumps(value)[:60])
def test_a_completion_request_with_this_is_refused_and_the_field_is_named(client, fields, param):
    refused(post(client, "/v1/completions", json.dumps(COMPLETION | fields).encode()), 400, param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"model": NaN}',
        b'{"model": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b"[" * 50_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"\x1f\x8b\x08\x00",
    ],
    ids=lambda content: repr(content[:24]),
)
def test_a_body_that_is_no_json_object_is_refused(client, path, content):
    refused(post(client, path, content), 400, None, "invalid_json")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_missing_field_is_named(client, path):
    refused(post(client, path, b"{}"), 400, "model", "missing_required_parameter")


def test_an_unknown_model_is_not_found(client):
    body = json.dumps(CHAT | {"model": "gpt-9"}).encode()
    refused(post(client, "/v1/chat/completions", body), 404, "model", "model_not_found")
    body = json.dumps(COMPLETION | {"model": "gpt-9"}).encode()
    refused(post(client, "/v1/completions", body), 404, "model", "model_not_found")


def test_prompt_and_output_over_the_context_are_told_apart(client):
    code = "context_length_exceeded"
    body = json.dumps(COMPLETION | {"prompt": [1] * 200, "max_tokens": 57}).encode()
    message = refused(post(client, "/v1/completions", body), 400, "max_tokens", code)
    assert "256 tokens" in message
    assert "257 tokens" in message
    body = json.dumps(COMPLETION | {"prompt": [1] * 256, "max_tokens": 1}).encode()
    refused(post(client, "/v1/completions", body), 400, "prompt", code)


def test_a_body_over_the_limit_is_refused_whether_its_length_is_announced_or_not(client):
    body = json.dumps(CHAT | {"user": "x" * LIMITS.max_body_bytes}).encode()
    refused(post(client, "/v1/chat/completions", body), 413, None, "body_too_large")
    pieces = (body[start : start + 1000] for start in range(0, len(body), 1000))
    response = client.post("/v1/chat/completions", content=pieces, headers={"content-type": "application/json"})
    refused(response, 413, None, "body_too_large")


def test_a_body_that_does_not_come_is_not_waited_for(gateway):
    host, _, port = gateway.gateway.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
        )
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_body_that_a_browser_would_send_unasked_is_refused(client):
    body = json.dumps(CHAT).encode()
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = post(client, "/v1/chat/completions", body, content_type)
        refused(response, 415, None, "unsupported_media_type")


def test_unknown_paths_and_wrong_methods_have_the_same_shape(client):
    assert client.get("/v1/nothing").json()["error"]["code"] == "unknown_url"
    assert client.get("/v1/chat/completions").status_code == 405
    assert client.get("/v1/chat/completions").json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/models/gpt-9").json()["error"]["code"] == "model_not_found"
