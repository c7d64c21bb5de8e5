"""Listening and connecting, over real sockets."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from protos.serving import Server, connect, host_port, serve

NAME = "headrace.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DEADLINE_S = 20.0


class Endless(inference_pb2_grpc.InferenceServiceServicer):
    """Generates until it is cancelled, and says when that has happened."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            yield inference_pb2.GenerateResponse(text="one")
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="m")])


async def serve_endless(port: int = 0) -> tuple[Server, Endless]:
    servicer = Endless()

    def register(server: grpc.aio.Server) -> Sequence[str]:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        return [NAME]

    return await serve(register, host="127.0.0.1", port=port), servicer


def test_a_server_says_where_it_listens_and_answers_there():
    async def check() -> None:
        server, _ = await serve_endless()
        async with connect(server.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            reply = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=DEADLINE_S)
        assert [model.name for model in reply.models] == ["m"]
        await server.stop(0)

    asyncio.run(check())


def test_a_taken_port_is_an_error_and_not_shared():
    async def check() -> None:
        server, _ = await serve_endless()
        with pytest.raises(OSError, match="cannot listen"):
            await serve_endless(port=int(server.address.rpartition(":")[2]))
        await server.stop(0)

    asyncio.run(check())


def test_health_is_not_serving_until_the_server_is_set_ready():
    async def check() -> None:
        server, _ = await serve_endless()
        async with connect(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for ready, status in ((None, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
                if ready is not None:
                    await server.set_ready(ready)
                for service in ("", NAME):
                    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
                    assert reply.status == status
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Check(health_pb2.HealthCheckRequest(service="nonsense"), timeout=DEADLINE_S)
            assert raised.value.code() == grpc.StatusCode.NOT_FOUND
        await server.stop(0)

    asyncio.run(check())


def test_every_health_watcher_is_told_even_after_another_has_left():
    """The servicer that comes with grpcio-health-checking forgets all watchers of a service when one of them leaves."""

    async def check() -> None:
        server, _ = await serve_endless()
        async with connect(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S) for _ in range(2))
            try:
                assert (await leaving.read()).status == NOT_SERVING
                assert (await staying.read()).status == NOT_SERVING
                leaving.cancel()
                await server.set_ready(True)
                assert (await staying.read()).status == SERVING
                await server.stop(DEADLINE_S)
                assert (await staying.read()).status == NOT_SERVING
                assert await staying.read() is grpc.aio.EOF
            finally:
                leaving.cancel()
                staying.cancel()

    asyncio.run(check())


def test_reflection_lists_the_services_with_their_files():
    async def check() -> None:
        server, _ = await serve_endless()
        async with connect(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME),
            ]
            call = stub.ServerReflectionInfo(iter(requests), timeout=DEADLINE_S)
            try:
                listed = await call.read()
                described = await call.read()
            finally:
                call.cancel()
        assert {service.name for service in listed.list_services_response.service} == {
            NAME,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert described.file_descriptor_response.file_descriptor_proto
        await server.stop(0)

    asyncio.run(check())


def test_stopping_cancels_what_has_not_ended_by_itself_and_may_be_done_twice():
    async def check() -> None:
        server, servicer = await serve_endless()
        async with connect(server.address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
            try:
                assert (await call.read()).text == "one"
                await server.stop(0)
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.read()
            finally:
                call.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await servicer.cancelled.wait()
        await server.stop(0)

    asyncio.run(check())


SERVER_PROCESS = """
import asyncio
from tests.protos.test_serving import serve_endless

async def main():
    server, _ = await serve_endless()
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_call_to_a_peer_that_freezes_ends_as_unavailable():
    """Nothing but the ping timeout notices this; a stream without a deadline would wait for ever."""

    async def check(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        async with connect(process.stdout.readline().strip()) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
            try:
                assert (await call.read()).text == "one"
                process.send_signal(signal.SIGSTOP)
                async with asyncio.timeout(DEADLINE_S):
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await call.read()
            finally:
                call.cancel()
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE

    with subprocess.Popen([sys.executable, "-c", SERVER_PROCESS], stdout=subprocess.PIPE, text=True) as process:
        try:
            asyncio.run(check(process))
        finally:
            process.kill()


def test_an_ipv6_address_gets_its_brackets():
    assert host_port("::1", 80) == "[::1]:80"
    assert host_port("127.0.0.1", 80) == "127.0.0.1:80"
