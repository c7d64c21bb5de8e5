"""The gateway's side of `DecodeService.Session`: one stream per decode worker, and the attempts that travel on it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection

import grpc

from cluster.gateway.events import Ending, Event, Lost, from_proto
from cluster.view import Peer
from protos import worker_pb2, worker_pb2_grpc
from protos.serving import connect

logger = logging.getLogger(__name__)


class SessionLost(Exception):
    """No attempt can be started on this session."""


class Attempt:
    """One placement of a request: a queue of its events. The last one is an `Ending`, unless it is cancelled before."""

    def __init__(self, session: Session, request_id: str, number: int) -> None:
        self.name = (request_id, number)
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._arrival: asyncio.Future[None] | None = None
        self._heard_s = 0.0
        self._silence: asyncio.TimerHandle | None = None

    async def answer(self, timeout_s: float) -> Event:
        """The first event. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._await_event()
        return self._events.pop(0)

    async def events(self) -> list[Event]:
        """All events that have come, at least one. `end_after_silence` bounds the wait."""
        await self._await_event()
        events, self._events = self._events, []
        return events

    def end_after_silence(self, timeout_s: float) -> None:
        """From now on, cancel the attempt and call it lost as soon as nothing has come for so long."""
        self._heard_s = self._loop.time()
        # One timer that looks back now and then: a timeout around every wait costs a tenth of all work per token.
        self._silence = self._loop.call_later(timeout_s, self._check_silence, timeout_s)

    def put(self, event: Event) -> None:
        """For the session: an event has come."""
        self._heard_s = self._loop.time()
        self._events.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def cancel(self) -> None:
        """Drop what still comes and tell the worker to stop. Idempotent; does nothing after an ending."""
        self.stop_clock()
        self._session.cancel(self)

    def stop_clock(self) -> None:
        """For the session too: no more events will come."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    async def _await_event(self) -> None:
        if not self._events:
            self._arrival = self._loop.create_future()
            await self._arrival

    def _check_silence(self, timeout_s: float) -> None:
        silent_s = self._loop.time() - self._heard_s
        if silent_s < timeout_s:
            self._silence = self._loop.call_later(timeout_s - silent_s, self._check_silence, timeout_s)
            return
        self.cancel()
        self.put(Lost(f"silent for {silent_s:.1f} s"))


class Session:
    """One stream to one process of a decode worker.

        opening --welcome--> open --the stream or the worker ends, or `close`--> lost

    A lost session stays lost, and every attempt on it has been told. All methods belong to the event loop's thread.
    """

    def __init__(self, peer: Peer, gateway_incarnation: str, *, open_timeout_s: float, max_unsent_bytes: int) -> None:
        self.peer = peer
        self.lost: str | None = None
        """Why the session ended."""
        self._gateway_incarnation = gateway_incarnation
        self._open_timeout_s = open_timeout_s
        self._max_unsent_bytes = max_unsent_bytes
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._unsent: deque[worker_pb2.SessionRequest] = deque()
        self._unsent_bytes = 0
        self._to_send = asyncio.Event()
        self._settled = asyncio.Event()  # open, or lost
        self._task = asyncio.create_task(self._run(), name=f"session with {peer.node_id}")

    async def opened(self) -> None:
        """Wait for the worker's welcome. Raises SessionLost."""
        await self._settled.wait()
        if self.lost is not None:
            raise SessionLost(self.lost)

    def start(self, start: worker_pb2.StartAttempt) -> Attempt:
        """Send an attempt. Raises SessionLost, also if the worker does not read what was sent before."""
        if self.lost is not None:
            raise SessionLost(self.lost)
        if self._unsent_bytes > self._max_unsent_bytes:
            raise SessionLost(f"{self.peer.node_id} does not read")
        attempt = Attempt(self, start.request_id, start.attempt)
        self._attempts[attempt.name] = attempt
        self._send(worker_pb2.SessionRequest(start=start))
        return attempt

    def cancel(self, attempt: Attempt) -> None:
        """See `Attempt.cancel`."""
        if self._attempts.pop(attempt.name, None) is not None:
            request_id, number = attempt.name
            self._send(
                worker_pb2.SessionRequest(cancel=worker_pb2.CancelAttempt(request_id=request_id, attempt=number))
            )

    def close(self, reason: str) -> None:
        """End the stream, whereupon the worker cancels what is left of it. Idempotent."""
        self._lose(reason)
        self._task.cancel()

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the stream is left."""
        return self._task.done()

    async def ended(self) -> None:
        """Wait until the stream has ended."""
        await asyncio.wait([self._task])

    def _send(self, request: worker_pb2.SessionRequest) -> None:
        self._unsent.append(request)
        self._unsent_bytes += request.ByteSize()
        self._to_send.set()

    def _lose(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._settled.set()
        attempts, self._attempts = self._attempts, {}
        logger.info("session with %s ended, %d attempts on it: %s", self.peer.node_id, len(attempts), reason)
        for attempt in attempts.values():
            attempt.stop_clock()
            attempt.put(Lost(reason))

    async def _run(self) -> None:
        reason = "cancelled"
        try:
            async with connect(self.peer.address) as channel:
                reason = await self._stream(worker_pb2_grpc.DecodeServiceStub(channel).Session())
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except TimeoutError:
            reason = "no welcome"
        except Exception:
            # The attempts go on elsewhere; the traceback says what to repair.
            logger.exception("session with %s failed", self.peer.node_id)
            reason = "an error in the gateway"
        finally:
            self._lose(reason)

    async def _stream(self, call: grpc.aio.StreamStreamCall) -> str:
        """Run the stream. Returns why it ended."""
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._open_timeout_s):
                hello = worker_pb2.SessionHello(gateway_incarnation=self._gateway_incarnation)
                await _write(call, worker_pb2.SessionRequest(hello=hello))
                response = await call.read()
            if response is grpc.aio.EOF or response.WhichOneof("message") != "welcome":
                return "no welcome"
            if response.welcome.incarnation != self.peer.incarnation:
                return f"another process answers at {self.peer.address}"
            self._settled.set()
            writer = asyncio.create_task(self._write_all(call))
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.WhichOneof("message") == "step":
                    self._dispatch(response.step)
            return "the worker closed the session"
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.wait([writer])

    async def _write_all(self, call: grpc.aio.StreamStreamCall) -> None:
        """Send what is to be sent, until the call has ended."""
        while True:
            self._to_send.clear()
            while self._unsent:
                request = self._unsent.popleft()
                if not await _write(call, request):
                    return
                self._unsent_bytes -= request.ByteSize()
            await self._to_send.wait()

    def _dispatch(self, step: worker_pb2.StepEvents) -> None:
        for message in step.events:
            attempt = self._attempts.get((message.request_id, message.attempt))
            if attempt is None:
                continue  # cancelled, or of an attempt that was placed anew
            event = from_proto(message)
            if event is None:
                continue
            if isinstance(event, Ending):
                del self._attempts[attempt.name]
                attempt.stop_clock()
            attempt.put(event)


async def _write(call: grpc.aio.StreamStreamCall, request: worker_pb2.SessionRequest) -> bool:
    """False if the call has ended: reading from it tells why."""
    try:
        await call.write(request)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        return False
    return True


class SessionPool:
    """The sessions of one gateway, opened when first needed and again after they were lost."""

    def __init__(self, gateway_incarnation: str, *, open_timeout_s: float, max_unsent_bytes: int) -> None:
        self._gateway_incarnation = gateway_incarnation
        self._open_timeout_s = open_timeout_s
        self._max_unsent_bytes = max_unsent_bytes
        self._sessions: dict[Peer, Session] = {}
        self._ending: set[Session] = set()  # lost or closed, and kept until their streams have ended

    async def session(self, peer: Peer) -> Session:
        """An open session with that process. Raises SessionLost."""
        session = self._sessions.get(peer)
        if session is not None and session.lost is not None:
            self._drop(peer, session.lost)
            session = None
        if session is None:
            session = Session(
                peer,
                self._gateway_incarnation,
                open_timeout_s=self._open_timeout_s,
                max_unsent_bytes=self._max_unsent_bytes,
            )
            self._sessions[peer] = session
        await session.opened()
        return session

    def retain(self, peers: Collection[Peer], reason: str) -> None:
        """Close the sessions with everybody else: the control plane says that they are gone."""
        for peer in self._sessions.keys() - set(peers):
            self._drop(peer, reason)

    async def close(self, reason: str) -> None:
        """Close all, and wait until their streams have ended."""
        self.retain((), reason)
        while self._ending:
            await self._ending.pop().ended()

    def _drop(self, peer: Peer, reason: str) -> None:
        session = self._sessions.pop(peer)
        session.close(reason)
        self._ending = {old for old in self._ending if not old.has_ended} | {session}
