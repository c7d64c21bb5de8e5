"""One way to listen and one way to connect, for every gRPC process of the cluster."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.health import SERVICE_NAME as HEALTH_SERVICE_NAME
from protos.health import Health

MAX_MESSAGE_BYTES = 64 << 20
"""Both directions. The largest messages are runs of page keys, which their senders cut far below this."""

PING_INTERVAL_MS = 2_000
PING_TIMEOUT_MS = 3_000
"""A frozen peer or a cut link ends every call with UNAVAILABLE after at most 5 s. Shorter would mistake a starved peer
for a dead one: on two busy cores an answer has been seen to take over a second."""

_KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # Without this one a frozen peer is not noticed at all, whatever the two above say.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_MESSAGES: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
_SERVER: tuple[tuple[str, int], ...] = (
    *_KEEPALIVE,
    *_MESSAGES,
    # Half the client's interval: a client that pings faster than permitted is sent away with "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS // 2),
    # Two processes on one port would each get some of the calls; a taken port has to fail instead.
    ("grpc.so_reuseport", 0),
)
_CLIENT: tuple[tuple[str, int], ...] = (
    *_KEEPALIVE,
    *_MESSAGES,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Also the time that one attempt to connect may take; the default of 20 s waits too long for a host that is gone.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A connection and a backoff of its own for each channel, instead of one shared by all that name the same address.
    ("grpc.use_local_subchannel_pool", 1),
    # Nodes reach one another directly, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
)


def host_port(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server:
    """A listening gRPC server. Made by `serve`; its health says NOT_SERVING until `set_ready(True)`."""

    def __init__(self, server: grpc.aio.Server, health: Health, address: str) -> None:
        self._server = server
        self._health = health
        self.address = address
        """host:port as other processes reach it."""

    async def set_ready(self, ready: bool) -> None:
        """Answer health checks of all services with SERVING or NOT_SERVING."""
        await self._health.set_ready(ready)

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, refuse new calls, give running ones `grace_s` seconds, then cancel them. Idempotent."""
        await self._health.close()
        await self._server.stop(grace_s)


async def serve(register: Callable[[grpc.aio.Server], Sequence[str]], *, host: str, port: int = 0) -> Server:
    """Listen on `host`, with the standard health and reflection services beside those that `register` adds.

    register: adds servicers to the server and returns the full names of their services.
    port: 0 takes a free one; `address` of the result says which.
    Raises OSError if the address cannot be bound, above all if another process holds the port.
    """
    server = grpc.aio.server(options=_SERVER)
    names = register(server)
    health = Health(names)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection([*names, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME], server)
    wanted = host_port(host, port)
    try:
        bound = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise OSError(errno.EADDRINUSE, f"cannot listen on {wanted}: {error}") from error
    await server.start()
    return Server(server, health, host_port(host, bound))


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `address`; close it when done. Connects at the first call.

    A peer that dies, freezes or is cut off ends the calls with UNAVAILABLE within five seconds; the channel itself
    reconnects for ever, waiting from 100 ms to 2 s in between.
    """
    return grpc.aio.insecure_channel(address, options=_CLIENT)
