"""The control plane's gRPC service: streams in, streams out; every decision is the state's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc

from cluster.catalog import CatalogUnavailable, Fenced
from cluster.control.feed import DirectiveQueue, WatchFeed
from cluster.control.outgoing import EndKind, EndSession, Outgoing, ToNode, ToWatchers
from cluster.control.state import ClusterState, UnknownNodes
from protos import control_pb2, control_pb2_grpc

logger = logging.getLogger(__name__)

_STATUS: dict[EndKind, grpc.StatusCode] = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "superseded": grpc.StatusCode.FAILED_PRECONDITION,
    "replaced": grpc.StatusCode.ABORTED,
    "silent": grpc.StatusCode.DEADLINE_EXCEEDED,
}


class _Session:
    """One Join stream."""

    def __init__(self) -> None:
        self.directives = DirectiveQueue()
        self.end: asyncio.Future[tuple[grpc.StatusCode, str]] = asyncio.get_running_loop().create_future()
        """Set when it is to be ended, and how."""

    def finish(self, code: grpc.StatusCode, reason: str) -> None:
        if not self.end.done():
            logger.info("ending a node's stream: %s", reason)
            self.end.set_result((code, reason))


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Carries reports to the state and what it decides to the streams.

    record: writes an operator's action (what, details, who) to the audit log, before it is carried out.
    status: the answer to GetStatus.
    """

    def __init__(
        self,
        state: ClusterState,
        *,
        record: Callable[[str, str, str], Awaitable[None]],
        status: Callable[[], control_pb2.GetStatusResponse],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._record = record
        self._status = status
        self._clock = clock
        self._sessions: dict[int, _Session] = {}
        self._feeds: set[WatchFeed] = set()
        self._num_sessions = 0
        self._closed: str | None = None

    def deliver(self, outgoing: Iterable[Outgoing]) -> None:
        """Put what the state decided on its way. Never blocks."""
        for message in outgoing:
            match message:
                case ToWatchers(response):
                    for feed in self._feeds:
                        feed.push(response)
                case ToNode(number, response):
                    if (session := self._sessions.get(number)) is not None:
                        session.directives.push(response)
                case EndSession(number, kind, reason):
                    if (session := self._sessions.get(number)) is not None:
                        session.finish(_STATUS[kind], reason)

    def close(self, reason: str) -> None:
        """End all streams with UNAVAILABLE, and those that come from now on. Nodes are not taken for gone."""
        self._closed = reason
        for session in self._sessions.values():
            session.finish(grpc.StatusCode.UNAVAILABLE, reason)
        for feed in self._feeds:
            feed.finish(reason)

    async def Join(
        self, request_iterator: AsyncIterator[control_pb2.JoinRequest], context: grpc.aio.ServicerContext
    ) -> None:
        await self._refuse_if_closed(context)
        self._num_sessions += 1
        number, session = self._num_sessions, _Session()
        self._sessions[number] = session
        reading = asyncio.create_task(self._read(number, session, request_iterator))
        writing = asyncio.create_task(self._write(session, context))
        first: list[asyncio.Future[Any]] = [reading, writing, session.end]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            writing.cancel()
            results = await asyncio.gather(reading, writing, return_exceptions=True)
            del self._sessions[number]
            if self._closed is None:
                self.deliver(self._state.ended(number, "its stream broke"))
        if session.end.done():
            await context.abort(*session.end.result())
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _read(self, number: int, session: _Session, requests: AsyncIterator[control_pb2.JoinRequest]) -> None:
        async for request in requests:
            if session.end.done():
                return
            self.deliver(self._state.report(number, request, self._clock()))

    async def _write(self, session: _Session, context: grpc.aio.ServicerContext) -> None:
        while True:
            response = session.directives.take()
            if response is not None:
                await context.write(response)
            else:
                await session.directives.changed.wait()

    async def Watch(self, request: control_pb2.WatchRequest, context: grpc.aio.ServicerContext) -> None:
        await self._refuse_if_closed(context)
        feed = WatchFeed(self._state.snapshot)
        self._feeds.add(feed)
        logger.info("%s watches", request.watcher or context.peer())
        try:
            while feed.end is None:
                response = feed.take()
                if response is not None:
                    await context.write(response)
                else:
                    await feed.changed.wait()
        finally:
            self._feeds.discard(feed)
        await context.abort(grpc.StatusCode.UNAVAILABLE, feed.end)

    async def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetStatusResponse:
        await self._refuse_if_closed(context)
        return self._status()

    async def EvictPrefixes(
        self, request: control_pb2.EvictPrefixesRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.EvictPrefixesResponse:
        await self._refuse_if_closed(context)
        try:
            self._state.evict(request.node_ids)  # Refuses nonsense before it is recorded.
            await self._record("evict-prefixes", ", ".join(request.node_ids) or "all workers", context.peer())
            # Again: who is there may have changed while the catalog wrote.
            node_ids, outgoing = self._state.evict(request.node_ids)
        except UnknownNodes as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except (CatalogUnavailable, Fenced) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the catalog cannot record this now: {error}")
        self.deliver(outgoing)
        return control_pb2.EvictPrefixesResponse(node_ids=node_ids)

    async def _refuse_if_closed(self, context: grpc.aio.ServicerContext) -> None:
        if self._closed is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._closed)
