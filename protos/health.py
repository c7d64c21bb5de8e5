"""The standard health service, for asyncio servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """`grpc.health.v1.Health`: not serving until `set_ready(True)`.

    Unlike the servicer that comes with grpcio-health-checking, a watcher that leaves does not silence the others, and
    `close` ends the watchers' streams after telling them, so that they do not hold up a graceful stop to its deadline.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = frozenset(services) | {""}
        self._ready = False
        self._closed = False
        self._changed = asyncio.Condition()

    async def set_ready(self, ready: bool) -> None:
        """Say whether all services of this server can do work. Has no effect after `close`."""
        async with self._changed:
            self._ready = ready and not self._closed
            self._changed.notify_all()

    async def close(self) -> None:
        """Not serving from now on; every watcher is told and its stream ends."""
        async with self._changed:
            self._ready, self._closed = False, True
            self._changed.notify_all()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        return int(
            health_pb2.HealthCheckResponse.SERVING if self._ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        told: int | None = None
        closed = False
        while not closed:
            async with self._changed:
                await self._changed.wait_for(lambda: self._closed or self._status(request.service) != told)  # noqa: B023
                status, closed = self._status(request.service), self._closed
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
