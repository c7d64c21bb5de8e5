"""Finding a decode worker that takes a request, and deciding how often a request may be placed anew."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cluster.gateway.config import PlacementConfig
from cluster.gateway.errors import GatewayError, Internal, InvalidRequest, Overloaded, Unavailable
from cluster.gateway.events import Accepted, Ending, Failed, FailureCode, Lost, Rejected
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.sessions import Attempt, SessionLost, SessionPool
from cluster.router import Job, Route, Router
from cluster.watch import Watcher
from protos import worker_pb2

logger = logging.getLogger(__name__)

Start = Callable[[Route], worker_pb2.StartAttempt]
"""Makes the message of the next attempt."""

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0


class Retries:
    """How often one request may be placed anew. Plain arithmetic."""

    def __init__(self, config: PlacementConfig) -> None:
        self._config = config
        self._lost = 0
        self._internal = 0
        self._fruitless = 0

    def after(self, ending: Ending, *, progressed: bool) -> float:
        """Seconds to wait before the next attempt. progressed: the last one gave at least one token.

        Raises the GatewayError with which the request ends, if there is to be no other attempt.
        """
        match ending:
            case Failed(FailureCode.INVALID, message):
                raise InvalidRequest(message, code="invalid_value")
            case Failed(FailureCode.INTERNAL, _):
                self._internal += 1
                if self._internal > self._config.max_internal_failures:
                    raise Internal(f"The model failed {self._internal} times on this request")
            case Lost():
                self._lost += 1
                if self._lost > self._config.max_lost_workers:
                    raise Internal(f"{self._lost} workers were lost while they served this request")
        self._fruitless = 0 if progressed else self._fruitless + 1
        if self._fruitless >= self._config.max_fruitless_attempts:
            raise Unavailable("No worker gets on with this request", retry_after_s=self._config.retry_after_s)
        if self._fruitless == 0:
            return 0.0
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._fruitless - 1))


class AttemptEnded(Exception):
    """An attempt ended before it was accepted, in a way that counts against the request."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(str(ending))
        self.ending = ending


class Placer:
    """Places jobs on the workers of the view, in the router's order."""

    def __init__(
        self,
        watcher: Watcher,
        router: Router,
        sessions: SessionPool,
        config: PlacementConfig,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watcher = watcher
        self._router = router
        self._sessions = sessions
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._closed: str | None = None

    def close(self, reason: str) -> None:
        """Place nothing more."""
        self._closed = reason

    async def place(self, job: Job, start: Start, *, patient: bool) -> tuple[Attempt, Accepted]:
        """An attempt that a worker has accepted.

        Waits up to `placement_timeout_s` for a worker to appear; and, if `patient`, for room as well.
        Raises Overloaded, Unavailable, InvalidRequest, or AttemptEnded.
        """
        give_up_s = self._clock() + self._config.placement_timeout_s
        wait_s = FIRST_WAIT_S
        while True:
            change = self._watcher.change
            placed, refusals = await self._try_each(job, start)
            if placed is not None:
                return placed
            refusal = self._summary(job, refusals)
            left_s = give_up_s - self._clock()
            if left_s <= 0 or (isinstance(refusal, Overloaded) and not patient) or isinstance(refusal, InvalidRequest):
                raise refusal
            try:
                async with asyncio.timeout(min(wait_s, left_s)):
                    await change.wait()
            except TimeoutError:
                wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    async def _try_each(
        self, job: Job, start: Start
    ) -> tuple[tuple[Attempt, Accepted] | None, dict[Route, Rejected | Lost]]:
        """Ask the candidates in order. Returns the accepted attempt if there is one, and who refused and why."""
        refusals: dict[Route, Rejected | Lost] = {}
        for route in self._router.routes(self._watcher.view, job, self._clock()):
            if self._closed is not None:
                break
            answer = await self._ask(route, start)
            if isinstance(answer, tuple):
                return answer, refusals
            refusals[route] = answer
        if self._closed is not None:
            raise Unavailable(self._closed, retry_after_s=self._config.retry_after_s)
        return None, refusals

    async def _ask(self, route: Route, start: Start) -> tuple[Attempt, Accepted] | Rejected | Lost:
        """Lost: the worker could not be asked, or did not answer."""
        worker = route.decode.node_id
        message = start(route)
        try:
            session = await self._sessions.session(route.decode)
            attempt = session.start(message)
        except SessionLost as error:
            self._metrics.attempt("unreachable")
            logger.info("%s: %s cannot be asked: %s", message.request_id, worker, error)
            return Lost(str(error))
        self._router.placed(route, self._clock())
        try:
            answer = await attempt.answer(self._config.admission_timeout_s)
        except TimeoutError:
            attempt.cancel()
            self._metrics.attempt("silent")
            logger.warning("%s: %s did not answer", message.request_id, worker)
            return Lost("no answer")
        except BaseException:
            attempt.cancel()
            raise
        match answer:
            case Accepted():
                self._metrics.attempt("accepted")
                attempt.end_after_silence(self._config.silence_timeout_s)
                return attempt, answer
            case Rejected():
                self._metrics.attempt("rejected")
                return answer
            case Failed(FailureCode.RESOURCE_EXHAUSTED, _):
                self._metrics.attempt("rejected")
                return Rejected(route.needed_pages, 0)
            case Failed() | Lost():
                self._metrics.attempt("failed")
                raise AttemptEnded(answer)
            case _:
                attempt.cancel()
                raise AttemptEnded(Failed(FailureCode.INTERNAL, f"{worker} sent {answer} before it accepted"))

    def _summary(self, job: Job, refusals: dict[Route, Rejected | Lost]) -> GatewayError:
        """What to tell the client if this was the last round."""
        rejections = {route: answer for route, answer in refusals.items() if isinstance(answer, Rejected)}
        if not rejections:
            text = f"No worker of {job.model!r} " + ("answers" if refusals else "is ready")
            return Unavailable(text, retry_after_s=self._config.retry_after_s)
        nodes = self._watcher.view.nodes
        if len(rejections) == len(refusals) and all(
            route.decode.node_id in nodes and answer.needed_pages > nodes[route.decode.node_id].load.pages_total
            for route, answer in rejections.items()
        ):
            # It would be refused for ever: an empty worker is too small.
            needed = min(answer.needed_pages for answer in rejections.values())
            return InvalidRequest(
                f"Prompt and max_tokens need {needed} pages, more than any worker has",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return Overloaded(f"Every worker of {job.model!r} is full", retry_after_s=self._config.retry_after_s)
