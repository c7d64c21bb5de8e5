"""The chat client against what a gateway may send."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from cluster.cli.chat import ChatClient, ChatError

SAY_HI = [{"role": "user", "content": "hi"}]


@contextmanager
def gateway(status: int, body: str) -> Iterator[tuple[str, list[Any]]]:
    """Answers one request with `body`; yields the address and the list that takes the request's body."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}", asked
        thread.join()


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"


ROLE = 'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n'
USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n'
DONE = "data: [DONE]\n\n"


def test_an_answer_comes_in_pieces() -> None:
    with gateway(200, ROLE + ": waiting\n\n" + event("Hel") + event("lö ✓") + USAGE + DONE) as (address, asked):
        assert list(ChatClient(address, "m").stream(SAY_HI, max_tokens=5)) == ["Hel", "lö ✓"]
    assert asked == [{"model": "m", "messages": SAY_HI, "stream": True, "temperature": 0, "max_tokens": 5}]


def test_an_answer_that_ends_without_its_end_mark_broke_off() -> None:
    with gateway(200, event("Hel")) as (address, _), pytest.raises(ChatError, match="broke off"):
        list(ChatClient(address, "m").stream(SAY_HI))


def test_an_error_in_the_stream_is_an_error() -> None:
    error = 'data: {"error": {"message": "the worker died", "type": "server_error"}}\n\n'
    with gateway(200, event("Hel") + error) as (address, _), pytest.raises(ChatError, match="the worker died"):
        list(ChatClient(address, "m").stream(SAY_HI))


@pytest.mark.parametrize(
    ("body", "said"),
    [('{"error": {"message": "no such model"}}', "no such model"), ("oops", "HTTP 404"), ('{"error": 1}', "HTTP 404")],
)
def test_a_refusal_says_what_the_gateway_said(body: str, said: str) -> None:
    with gateway(404, body) as (address, _), pytest.raises(ChatError, match=said):
        list(ChatClient(address, "m").stream(SAY_HI))


def test_a_gateway_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ChatError, match=f"{address}.*refused"):
            list(ChatClient(address, "m").stream(SAY_HI))
