"""Calls of the control plane by commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from cluster.cli.errors import CommandError
from protos import control_pb2_grpc
from protos.serving import connect

DEADLINE_S = 10.0

Response = TypeVar("Response")


def call_control(
    address: str, call: Callable[[control_pb2_grpc.ControlServiceStub, float], Awaitable[Response]]
) -> Response:
    """The answer of one unary call. call: given the stub and the seconds that it may take.

    Raises CommandError if the control plane does not answer or refuses.
    """

    async def run() -> Response:
        async with connect(address) as channel:
            return await call(control_pb2_grpc.ControlServiceStub(channel), DEADLINE_S)

    try:
        return asyncio.run(run())
    except grpc.aio.AioRpcError as error:
        raise CommandError(f"the control plane at {address}: {error.code().name}: {error.details()}") from error
