"""`DecodeService`: the long-lived streams of the gateways."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from decode_node.messages import CancelAttempt, Failed, FailureCode, Reply, SessionLost
from decode_node.wire import session_response, start_attempt
from protos import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

_MAX_UNREAD = 4096
"""Messages that a gateway may leave unread:

one is written per step, so this is minutes of silence. Then it is dropped.
"""


class DecodeService(worker_pb2_grpc.DecodeServiceServicer):
    """Turns what gateways say into events for the core, and the core's replies into one message per step and gateway.

    A session ends with its stream; its attempts are then cancelled (`SessionLost`).
    """

    def __init__(self, incarnation: str, model: str, deliver: Callable[[object], None]) -> None:
        self._incarnation = incarnation
        self._model = model
        self._deliver = deliver
        self._unread: dict[str, asyncio.Queue[worker_pb2.SessionResponse | None]] = {}
        self._numbers = itertools.count(1)

    def reply(self, reply: Reply) -> None:
        """Send one turn's events. A session that is gone, or does not read, misses them: it is over."""
        self._send(reply.session, session_response(reply))

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        session = f"session-{next(self._numbers)}"
        unread: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue()
        self._unread[session] = unread
        unread.put_nowait(worker_pb2.SessionResponse(welcome=worker_pb2.SessionWelcome(incarnation=self._incarnation)))
        reader = asyncio.create_task(self._read(session, request_iterator), name=session)
        try:
            while (response := await unread.get()) is not None:
                yield response
        finally:
            reader.cancel()
            del self._unread[session]
            self._deliver(SessionLost(session))

    async def _read(self, session: str, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        """Until the gateway closes its side; then the session ends."""
        try:
            async for request in requests:
                self._take(session, request)
        finally:
            if (unread := self._unread.get(session)) is not None:
                unread.put_nowait(None)

    def _take(self, session: str, request: worker_pb2.SessionRequest) -> None:
        match request.WhichOneof("message"):
            case "hello":
                logger.info("%s is gateway %s", session, request.hello.gateway_incarnation)
            case "start":
                self._start(session, request.start)
            case "cancel":
                self._deliver(CancelAttempt(session, request.cancel.request_id, request.cancel.attempt))

    def _start(self, session: str, message: worker_pb2.StartAttempt) -> None:
        try:
            if message.model != self._model:
                raise ValueError(f"this worker serves {self._model!r}, not {message.model!r}")
            self._deliver(start_attempt(session, message))
        except ValueError as error:
            failed = Failed(FailureCode.INVALID, str(error))
            self.reply(Reply(session, ((message.request_id, message.attempt, failed),)))

    def _send(self, session: str, response: worker_pb2.SessionResponse) -> None:
        unread = self._unread.get(session)
        if unread is None:
            return
        if unread.qsize() >= _MAX_UNREAD:
            logger.warning("%s does not read: dropped", session)
            while not unread.empty():
                unread.get_nowait()
            unread.put_nowait(None)
            return
        unread.put_nowait(response)
