"""uvicorn inside the node's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from protos.serving import host_port


class _Server(uvicorn.Server):
    """Leaves the process' signal handlers alone, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises OSError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only on sockets that name their protocol, which those of
    # `socket.create_server` do not. With it, every event of a stream waits 40 ms for the client's delayed ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener


class HttpServer:
    """Serves an ASGI application from `start` to `stop`."""

    def __init__(self, app: ASGIApp, *, host: str, port: int) -> None:
        """port: 0 takes a free one; `address` says which."""
        self.address = ""
        """host:port, after `start`."""
        self._host = host
        self._port = port
        self._server = _Server(
            # No logging of its own: the gateway writes one line per request, and entry points configure logging.
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                ws="none",
                proxy_headers=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it listens. Raises OSError if the address cannot be bound."""
        listener = listen(self._host, self._port)
        self.address = host_port(self._host, listener.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name=f"http on {self.address}")
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait((self._task, listening), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            listener.close()
            self._task.result()
            raise RuntimeError("uvicorn ended before it listened")

    @property
    def task(self) -> asyncio.Task[None]:
        """Ends when it no longer serves. Call it after `start`."""
        assert self._task is not None, "not started"
        return self._task

    async def stop(self) -> None:
        """Take no more connections, end those that are open. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        self._server.should_exit = True
        await asyncio.wait([task])
        # uvicorn closes them itself, unless its task did not get that far.
        for server in self._server.servers:
            server.close()
