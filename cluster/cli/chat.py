"""`headrace chat`: talk to a cluster through its OpenAI HTTP API."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
from collections.abc import Generator, Iterator

from cluster.cli.errors import CommandError
from cluster.cli.which import ready_cluster
from cluster.spec import HostPort, parse_host_port

SILENCE_S = 120.0
"""Without a byte for so long, an answer counts as lost. A gateway sends comments while a request waits."""


class ChatError(Exception):
    """The gateway refused, failed, or went away; the text is what it said."""


class ChatClient:
    """Streams answers of `/v1/chat/completions`. One connection per answer."""

    def __init__(self, address: str, model: str) -> None:
        self._address: HostPort = parse_host_port(address)
        self._model = model

    def stream(self, messages: list[dict[str, str]], max_tokens: int | None = None) -> Generator[str, None, None]:
        """The pieces of the answer as they come; closing the generator cancels the request.

        Raises ChatError, also for an answer that ends without saying why.
        """
        body = {"model": self._model, "messages": messages, "stream": True, "temperature": 0}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        connection = http.client.HTTPConnection(self._address.host, self._address.port, timeout=SILENCE_S)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_error_text(response.read(), f"HTTP {response.status} {response.reason}"))
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self._address}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("chat", help="talk to it", description="Talk to a cluster. Ctrl-D ends the talk.")
    parser.add_argument("--once", metavar="TEXT", help="say this, print the answer, and end")
    parser.add_argument("--model", help="one of the cluster's models; without it, the first")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="longest answer")
    parser.add_argument("--cluster", metavar="NAME", help="which cluster, where several run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    addresses = ready_cluster(arguments.cluster)
    model = arguments.model or addresses.models[0]
    if model not in addresses.models:
        raise CommandError(f"cluster {addresses.cluster} has no model {model}; it has {', '.join(addresses.models)}")
    client = ChatClient(addresses.http, model)
    if arguments.once is not None:
        try:
            _answer(client, [{"role": "user", "content": arguments.once}], arguments.max_tokens)
        except ChatError as error:
            raise CommandError(str(error)) from error
        return 0
    return _talk(client, arguments.max_tokens)


def _talk(client: ChatClient, max_tokens: int | None) -> int:
    """Ctrl-C cuts an answer short; at the prompt it ends the talk, as Ctrl-D does."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then has a history and can be edited
    messages: list[dict[str, str]] = []
    while True:
        try:
            said = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        try:
            messages.append({"role": "assistant", "content": _answer(client, messages, max_tokens)})
        except KeyboardInterrupt:
            print(" [cut short]")
            messages.pop()
        except ChatError as error:
            print(f"headrace: {error}", file=sys.stderr)
            messages.pop()


def _answer(client: ChatClient, messages: list[dict[str, str]], max_tokens: int | None) -> str:
    """Print the answer as it comes; returns it."""
    stream, text = client.stream(messages, max_tokens), ""
    try:
        for piece in stream:
            text += piece
            print(piece, end="", flush=True)
    finally:
        stream.close()
    print()
    return text


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The text in a stream of server-sent events, up to the event that says that it is complete."""
    for raw in response:
        line = raw.decode().rstrip("\r\n")
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(_error_text(data.encode(), "the request failed"))
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise ChatError("the answer broke off")


def _error_text(body: bytes, otherwise: str) -> str:
    """The message in OpenAI's error shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return otherwise


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
