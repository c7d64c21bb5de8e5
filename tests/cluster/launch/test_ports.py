"""Held ports: taken ones are noticed, ours survive the restart of the process that serves on them."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from cluster.launch.ports import HeldPort, PortTaken
from cluster.spec import HostPort
from protos.serving import serve

ANY = HostPort("127.0.0.1", 0)


def test_a_port_that_somebody_listens_on_is_refused_by_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port}: Address already in use"):
            HeldPort(HostPort("127.0.0.1", port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PortTaken, match=r"192\.0\.2\.77:8000"):
        HeldPort(HostPort("192.0.2.77", 8000))


def test_a_held_port_serves_grpc_again_and_again_and_nobody_else_can_hold_it() -> None:
    held = HeldPort(ANY)

    async def serve_twice() -> None:
        for _ in range(2):
            server = await serve(lambda server: [], host=held.address.host, port=held.address.port)
            assert server.address == str(held.address)
            with pytest.raises(PortTaken):
                HeldPort(held.address)
            async with grpc.aio.insecure_channel(server.address) as channel:
                await asyncio.wait_for(channel.channel_ready(), 10)
            await server.stop(0)

    asyncio.run(serve_twice())
    held.release()


def test_a_held_port_serves_http() -> None:
    held = HeldPort(ANY)
    address = (held.address.host, held.address.port)
    with socket.create_server(address) as server, socket.create_connection(address, timeout=10):
        server.accept()[0].close()
    held.release()


def test_a_released_port_is_free() -> None:
    held = HeldPort(ANY)
    held.release()
    held.release()
    again = HeldPort(held.address)
    again.release()
