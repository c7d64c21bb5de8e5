"""A server of /v1/completions and a control plane, at the wire: what the load generator talks to, and no engine.

It cannot show how a real worker frees its pages; it shows that what a worker reports is read rightly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos import common_pb2, control_pb2, control_pb2_grpc
from protos.serving import Server, serve

PAGES = 100
PAGES_PER_REQUEST = 3


class ScriptedServer(control_pb2_grpc.ControlServiceServicer):
    """Says one word per token, holds pages for as long as a client stays, and reports that."""

    def __init__(self, *, token_s: float = 0.0, report_s: float = 0.005, leak: bool = False) -> None:
        """leak: keep the pages of clients that leave. Change `usage` or `refusal` for other answers."""
        self.usage: dict[str, int] = {}
        """Counts to report instead of the true ones."""
        self.refusal: dict[str, Any] | None = None
        self.running = 0
        self.num_left = 0
        """Clients that closed before the end."""
        self.prompts: list[str] = []
        self._leaked = 0
        self._token_s = token_s
        self._report_s = report_s
        self._leak = leak

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.sockets[0].getsockname()[1]}"

    @property
    def control(self) -> str:
        return self._grpc.address

    async def __aenter__(self) -> ScriptedServer:
        self._http = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self._grpc: Server = await serve(self._register, host="127.0.0.1")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._grpc.stop(0)
        self._http.close()
        await self._http.wait_closed()

    def _register(self, server: grpc.aio.Server) -> list[str]:
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, server)
        return ["headrace.v1.ControlService"]

    async def Watch(self, request: control_pb2.WatchRequest, context: Any) -> AsyncIterator[control_pb2.WatchResponse]:
        yield control_pb2.WatchResponse(snapshot=control_pb2.Snapshot(nodes=[self._state(), self._gateway()]))
        while True:
            await asyncio.sleep(self._report_s)
            yield control_pb2.WatchResponse(node=self._state())

    def _state(self) -> control_pb2.NodeState:
        free = PAGES - PAGES_PER_REQUEST * (self.running + self._leaked)
        return control_pb2.NodeState(
            node=control_pb2.Node(node_id="decode-0", role=common_pb2.ROLE_DECODE),
            load=control_pb2.Load(pages_total=PAGES, pages_free=free, running=self.running),
        )

    @staticmethod
    def _gateway() -> control_pb2.NodeState:
        return control_pb2.NodeState(node=control_pb2.Node(node_id="gateway-0", role=common_pb2.ROLE_GATEWAY))

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
                )
                body = json.loads(await reader.readexactly(length))
                self.prompts.append(body["prompt"])
                await self._answer(body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusal is not None:
            content = json.dumps(self.refusal).encode()
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n%s" % (len(content), content))
            return
        self.running += 1
        left = asyncio.create_task(reader.read(1))  # a client that waits for its answer sends nothing
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(body["max_tokens"]):
                await asyncio.wait([left], timeout=self._token_s)
                if left.done():
                    self.num_left += 1
                    self._leaked += self._leak
                    raise ConnectionResetError
                self._send(writer, {"choices": [{"text": " word", "finish_reason": None}]})
            self._send(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
            usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
            self._send(writer, {"choices": [], "usage": usage | self.usage})
            self._chunk(writer, b"data: [DONE]\n\n")
            self._chunk(writer, b"")
            await writer.drain()
        finally:
            self.running -= 1
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)

    def _send(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
