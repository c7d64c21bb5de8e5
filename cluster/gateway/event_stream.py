"""A streamed answer: server-sent events for as long as its client listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.gateway.answers import KEEP_ALIVE, Answer, error_event
from cluster.gateway.disconnect import ClientGone, until_disconnected
from cluster.gateway.errors import GatewayError, Internal
from cluster.gateway.request import Generation

logger = logging.getLogger(__name__)


class EventStream(Response):
    """A streamed answer. Owns the generation: it is closed when the stream ends, or its client leaves."""

    def __init__(self, generation: Generation, answer: Answer, keep_alive_s: float) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-request-id": generation.request_id}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._keep_alive_s = keep_alive_s
        self._sent_at_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation, contextlib.suppress(ClientGone):
            await until_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        keeper = asyncio.create_task(self._keep_alive(send))
        try:
            await self._send(send, self._answer.opening())
            async with contextlib.aclosing(self._generation.outputs()) as outputs:
                async for output in outputs:
                    await self._send(send, self._answer.events(output))
        except GatewayError as error:
            self._generation.close(error)
            await self._send(send, error_event(error))
        except Exception as error:
            # Must not look like the end of a whole answer, whatever went wrong.
            logger.exception("%s: failed", self._generation.request_id)
            self._generation.close(error)
            await self._send(send, error_event(Internal("The gateway failed on this request")))
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, events: bytes) -> None:
        if events:
            self._sent_at_s = time.monotonic()
            await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._sent_at_s
            if silent_s >= self._keep_alive_s:
                await self._send(send, KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive_s - silent_s)
