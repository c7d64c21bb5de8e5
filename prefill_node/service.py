"""`PrefillService`: one stream per handover, whose life is the life of the pins on both sides."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from kvstore.plane import PagePlane
from prefill_node.messages import (
    Accept,
    Announce,
    CancelHandover,
    Complete,
    Fail,
    HandoverBroken,
    HandoverReleased,
)
from prefill_node.wire import accepted, done, failed, pages_ready, start_handover
from protos import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

_SILENCE_S = 5.0
"""A decode worker gives a prefill worker up that is silent for much longer."""

Instruction = Accept | Announce | Complete | Fail


class PrefillService(worker_pb2_grpc.PrefillServiceServicer):
    """Turns what decode workers say into events for the core, and the core's instructions into the stream's messages.

    A stream ends in good order when the last word was said and the decode worker has released the pages.
    """

    def __init__(
        self, plane: PagePlane, model: str, deliver: Callable[[object], None], is_working: Callable[[], bool]
    ) -> None:
        """is_working: whether the step loop has come round recently."""
        self._plane = plane
        self._is_working = is_working
        self._model = model
        self._deliver = deliver
        self._instructions: dict[str, asyncio.Queue[Instruction]] = {}
        self._released: set[str] = set()
        self._numbers = itertools.count(1)
        self.pages_served = 0
        """Pages announced since the start."""

    def carry_out(self, instruction: Instruction) -> None:
        """Say this on its stream; where the stream is gone there is nobody to say it to."""
        queue = self._instructions.get(instruction.handover)
        if queue is not None:
            queue.put_nowait(instruction)

    async def Prefill(
        self,
        request_iterator: AsyncIterator[worker_pb2.PrefillRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "start":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the first message of a Prefill stream must be `start`"
            )
            return
        if first.start.model != self._model:
            message = f"model: this worker serves {self._model!r}, not {first.start.model!r}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
            return
        handover = f"handover-{next(self._numbers)}"
        try:
            start = start_handover(handover, first.start)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        queue = self._instructions[handover] = asyncio.Queue()
        self._deliver(start)
        reader = asyncio.create_task(self._read(handover, request_iterator), name=handover)
        try:
            async for response in self._responses(queue):
                yield response
            await asyncio.wait([reader])
        finally:
            reader.cancel()
            del self._instructions[handover]
            if handover in self._released:
                self._released.remove(handover)
            else:
                self._deliver(HandoverBroken(handover))

    async def _responses(self, queue: asyncio.Queue[Instruction]) -> AsyncIterator[worker_pb2.PrefillResponse]:
        """In order, until the last word. Says that the worker is at it where there is nothing else to say."""
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    instruction = await queue.get()
            except TimeoutError:
                if self._is_working():
                    yield worker_pb2.PrefillResponse(pages=worker_pb2.PagesReady())
                continue
            match instruction:
                case Accept():
                    yield accepted(self._plane.card)
                case Announce():
                    digests = await asyncio.to_thread(self._plane.digests, [page.page for page in instruction.pages])
                    self.pages_served += len(instruction.pages)
                    yield pages_ready(instruction.pages, digests, self._plane.layout.page_bytes)
                case Complete():
                    yield done(instruction)
                    return
                case Fail():
                    yield failed(instruction)
                    return

    async def _read(self, handover: str, requests: AsyncIterator[worker_pb2.PrefillRequest]) -> None:
        """Until the decode worker has released the pages, or its side ends without that."""
        async for request in requests:
            match request.WhichOneof("message"):
                case "cancel":
                    self._deliver(CancelHandover(handover))
                case "released":
                    self._released.add(handover)
                    self._deliver(HandoverReleased(handover))
                    return
