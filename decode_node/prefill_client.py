"""The decode worker's side of the `Prefill` streams: one task per handover."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import grpc

from decode_node.messages import AskPrefill, CancelPrefill, PeerBroken, PeerDone, PeerFailed, ReleasePrefill
from decode_node.wire import from_prefill, prefill_start
from kvstore.plane import PagePlane
from kvstore.refs import PageRef
from protos import worker_pb2, worker_pb2_grpc
from protos.serving import connect

logger = logging.getLogger(__name__)

_CLOSING_S = 5.0
"""Seconds for the peer to end its side of a stream after `Released`."""


class PrefillClient:
    """Carries out AskPrefill, CancelPrefill and ReleasePrefill; what comes back goes to `deliver` as Peer* events.

    Every AskPrefill is answered by exactly one last word: PeerDone, PeerFailed or PeerBroken. All methods belong to the
    event loop's thread.
    """

    def __init__(self, plane: PagePlane, model: str, deliver: Callable[[object], None]) -> None:
        self._plane = plane
        self._model = model
        self._deliver = deliver
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._streams: Counter[str] = Counter()
        """How many streams use the channel to an address."""
        self._orders: dict[int, asyncio.Queue[worker_pb2.PrefillRequest]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_out(self, instruction: AskPrefill | CancelPrefill | ReleasePrefill) -> None:
        match instruction:
            case AskPrefill():
                self._orders[instruction.handover_id] = asyncio.Queue()
                task = asyncio.create_task(self._run(instruction), name=f"handover {instruction.handover_id}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case CancelPrefill():
                self._order(instruction.handover_id, worker_pb2.PrefillRequest(cancel=worker_pb2.PrefillCancel()))
            case ReleasePrefill():
                self._order(instruction.handover_id, worker_pb2.PrefillRequest(released=worker_pb2.PrefillReleased()))

    async def close(self) -> None:
        """Break every stream; the peers' grace begins."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    def _order(self, handover_id: int, request: worker_pb2.PrefillRequest) -> None:
        orders = self._orders.get(handover_id)
        if orders is not None:  # Else the stream is broken, and the peer knows.
            orders.put_nowait(request)

    async def _run(self, ask: AskPrefill) -> None:
        handover_id = ask.handover_id
        spoke = False

        def deliver(event: object) -> None:
            nonlocal spoke
            spoke = spoke or isinstance(event, (PeerDone, PeerFailed, PeerBroken))
            self._deliver(event)

        try:
            await self._converse(ask, deliver)
        except grpc.aio.AioRpcError as error:
            logger.info("%s: stream to %s broke: %s", ask.request_id, ask.peer.node_id, error.details())
            if not spoke:
                deliver(PeerBroken(handover_id, error.details() or error.code().name))
        except (ValueError, OSError) as error:
            logger.warning("%s: %s: %s", ask.request_id, ask.peer.node_id, error)
            if not spoke:
                deliver(PeerBroken(handover_id, str(error)))
        finally:
            del self._orders[handover_id]
            if not spoke:
                deliver(PeerBroken(handover_id, "the stream ended early"))

    async def _converse(self, ask: AskPrefill, deliver: Callable[[object], None]) -> None:
        held = await asyncio.to_thread(self._refs, ask)
        address = ask.peer.address
        if address not in self._channels:
            self._channels[address] = connect(address)
        self._streams[address] += 1
        broken = True
        try:
            await self._speak(ask, held, self._channels[address], deliver)
            broken = False
        finally:
            self._streams[address] -= 1
            if not self._streams[address]:
                del self._streams[address]
                if broken:
                    # A restarted worker has another address, and a channel to the old one would stay for ever.
                    await self._channels.pop(address).close()

    async def _speak(
        self, ask: AskPrefill, held: list[PageRef], channel: grpc.aio.Channel, deliver: Callable[[object], None]
    ) -> None:
        call = worker_pb2_grpc.PrefillServiceStub(channel).Prefill()
        start = worker_pb2.PrefillRequest(start=prefill_start(ask, self._model, held, self._plane.card))
        orders = asyncio.create_task(_send(call, start, self._orders[ask.handover_id]))
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                deliver(event := from_prefill(ask.handover_id, response))
                if isinstance(event, (PeerDone, PeerFailed)):
                    await orders
                    async with asyncio.timeout(_CLOSING_S):
                        await call.read()
                    return
        except TimeoutError:
            logger.info("%s: %s did not end its stream", ask.request_id, ask.peer.node_id)
        finally:
            orders.cancel()
            call.cancel()

    def _refs(self, ask: AskPrefill) -> list[PageRef]:
        digests = self._plane.digests([entry.page for entry in ask.lent])
        layout = self._plane.layout
        return [
            PageRef(
                page_index=entry.page_index,
                key=entry.key,
                offset_bytes=self._plane.cache.offset_bytes(entry.page),
                num_bytes=layout.page_bytes,
                digests=tuple(int(value) for value in row),
                valid_tokens=layout.page_size,
            )
            for entry, row in zip(ask.lent, digests, strict=True)
        ]


async def _send(
    call: grpc.aio.StreamStreamCall, start: worker_pb2.PrefillRequest, orders: asyncio.Queue[worker_pb2.PrefillRequest]
) -> None:
    """The stream's one writer: `start`, then what the core orders. Closes our side after `Released`."""
    try:
        await call.write(start)
        while True:
            request = await orders.get()
            await call.write(request)
            if request.WhichOneof("message") == "released":
                await call.done_writing()
                return
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # The stream is over; its reader says why.
