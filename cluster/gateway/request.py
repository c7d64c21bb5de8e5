"""The life of one request: attempts on workers, one text, one ending."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType

from cluster.gateway.ask import Ask, Sampling
from cluster.gateway.config import LimitsConfig, PlacementConfig
from cluster.gateway.disconnect import ClientGone
from cluster.gateway.errors import GatewayError, Overloaded, Unavailable
from cluster.gateway.events import Accepted, Ending, Event, Failed, Finished, Token, Tokens
from cluster.gateway.metrics import GatewayMetrics, Lifetime
from cluster.gateway.placement import AttemptEnded, Placer, Retries
from cluster.gateway.sessions import Attempt
from cluster.gateway.text import OutputText, Piece
from cluster.router import Job, Route
from engine.tokenizer import Detokenizer
from protos import common_pb2, worker_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of one request. `cached_tokens` of the prompt were computed by no worker for it."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of the answer. The last one has a finish reason ("stop" or "length") and the usage."""

    piece: Piece
    finish_reason: str | None = None
    usage: Usage | None = None


class Generation:
    """One request, from validation to its one ending.

        queued --admit--> running --outputs--> finished
           |               |    ^--new attempt--|
           +---------------+---------> failed | cancelled

    Every attempt has a number of its own; events of one that was given up are dropped and its work is cancelled. A new
    one starts from the prompt and the tokens that the lost one gave, so the text goes on where it was.
    Use it as a context manager: leaving it cancels what is still running, at once.
    """

    def __init__(
        self,
        request_id: str,
        ask: Ask,
        placer: Placer,
        config: PlacementConfig,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        received_s: float,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.request_id = request_id
        self.ask = ask
        self.lifetime = Lifetime(received_s=received_s)
        self._placer = placer
        self._metrics = metrics
        self._clock = clock
        self._on_close = on_close
        self._numbers = itertools.count(1)
        self._retries = Retries(config)
        self._attempt: Attempt | None = None
        self._progressed = False
        self._num_attempts = 0
        self._cached_tokens = 0
        self._max_output_tokens = ask.max_output_tokens
        self._token_ids: list[int] = []  # of the output, over all attempts
        self._text = OutputText(Detokenizer(ask.model.tokenizer), ask.stop)
        self._complete: str | None = None  # why the output ends here, seen from the gateway
        self._finish_reason: str | None = None
        self._closed = False

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(exc)

    async def admit(self) -> None:
        """Wait until a worker has accepted the request. Raises GatewayError."""
        await self._place(patient=False)
        self.lifetime.admitted_s = self._clock()

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """The answer, in pieces. Raises GatewayError if it cannot be finished. Call once, after `admit`."""
        while True:
            assert self._attempt is not None
            ending = self._take(await self._attempt.events())
            if isinstance(ending, Finished):
                self._complete = self._complete or ending.reason
                if self._num_attempts == 1:
                    self._cached_tokens = ending.cached_tokens
            if self._complete is not None:
                yield self._finish(self._complete)
                return
            if piece := self._text.piece():
                yield Output(piece)
            if ending is not None:
                await self._place_anew(ending)

    def close(self, error: BaseException | None = None) -> None:
        """End the request: cancel what is running, count it, log it. Idempotent.

        error: why it was not answered in full; None with no finish reason means that the client went away.
        """
        if self._closed:
            return
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        self.lifetime.ended_s = self._clock()
        error_type = None if self._finish_reason else _error_type(error)
        if isinstance(error, Overloaded):
            self._metrics.rejection(self.ask.model.name)
        usage = self.usage()
        self._metrics.ended(
            self.ask.operation,
            self.ask.model.name,
            self.lifetime,
            error_type,
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_output_tokens=usage.output_tokens,
        )
        logger.info(
            "%s: %s, %s, prompt %d tokens (%d cached), output %d, %d attempts, %.3f s",
            self.request_id,
            self.ask.model.name,
            self._finish_reason or error_type,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            self._num_attempts,
            self.lifetime.ended_s - self.lifetime.received_s,
        )
        self._on_close(self)

    def usage(self) -> Usage:
        num_prompt_tokens = len(self.ask.token_ids)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            output_tokens=self._text.num_tokens,
            cached_tokens=min(self._cached_tokens, num_prompt_tokens),
        )

    def _take(self, events: list[Event]) -> Ending | None:
        """Add the tokens to the output, up to where it ends. Returns the attempt's ending if that has come."""
        ending: Ending | None = None
        for event in events:
            match event:
                case Tokens(tokens):
                    self._progressed = True
                    for token in tokens:
                        self._append(token)
                case Accepted():
                    pass
                case _:
                    ending = event
        return ending

    def _append(self, token: Token) -> None:
        if self._complete is not None:
            return
        self.lifetime.last_token_s = self._clock()
        if self.lifetime.first_token_s is None:
            self.lifetime.first_token_s = self.lifetime.last_token_s
        self._token_ids.append(token.token_id)
        self._text.push(token)
        if self._text.stopped:
            self._complete = "stop"
        elif len(self._token_ids) >= self._max_output_tokens:
            self._complete = "length"

    def _finish(self, reason: str) -> Output:
        if self._attempt is not None:
            self._attempt.cancel()  # a stop string has come, say; the worker does not know
        self._text.finish()
        self._finish_reason = "stop" if self._text.stopped else reason
        return Output(self._text.piece(last=True), self._finish_reason, self.usage())

    async def _place_anew(self, ending: Ending) -> None:
        assert self._attempt is not None
        self._attempt.cancel()
        await self._wait_after(ending)
        await self._place(patient=True)

    async def _place(self, *, patient: bool) -> None:
        """patient: wait for room too, since the client has been promised an answer."""
        sampling = self.ask.sampling
        job = Job(
            model=self.ask.model.name,
            token_ids=[*self.ask.token_ids, *self._token_ids],
            max_tokens=sampling.max_tokens - len(self._token_ids) if sampling.max_tokens else None,
        )
        while True:
            try:
                self._attempt, accepted = await self._placer.place(
                    job, lambda route: self._start(job, route), patient=patient
                )
            except AttemptEnded as ended:
                await self._wait_after(ended.ending)
                continue
            self._progressed = False
            self._num_attempts += 1
            if self._num_attempts == 1:
                self._cached_tokens = accepted.cached_tokens
            return

    async def _wait_after(self, ending: Ending) -> None:
        """Raises GatewayError if the request is not to be placed again."""
        delay_s = self._retries.after(ending, progressed=self._progressed)
        cause = ending.code.name.lower() if isinstance(ending, Failed) else type(ending).__name__.lower()
        logger.info("%s: placed anew after %d tokens: %s", self.request_id, len(self._token_ids), ending)
        self._metrics.retry(cause)
        self._progressed = False
        await asyncio.sleep(delay_s)

    def _start(self, job: Job, route: Route) -> worker_pb2.StartAttempt:
        return worker_pb2.StartAttempt(
            request_id=self.request_id,
            attempt=next(self._numbers),
            model=job.model,
            token_ids=job.token_ids,
            num_prompt_tokens=len(self.ask.token_ids),
            sampling=_to_proto(self.ask.sampling),
            tenant_salt=job.tenant_salt,
            prefill_peers=[
                worker_pb2.PrefillPeer(node_id=peer.node_id, incarnation=peer.incarnation, address=peer.address)
                for peer in route.prefill
            ],
        )


def _error_type(error: BaseException | None) -> str:
    """What the metrics call it. Whatever is not an error of ours or a bug means that the client has left."""
    if isinstance(error, GatewayError):
        return error.code or type(error).__name__
    if error is None or isinstance(error, ClientGone) or not isinstance(error, Exception):
        return "cancelled"
    return type(error).__name__


def _to_proto(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logit_bias=sampling.logit_bias,
        top_logprobs=sampling.top_logprobs,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
    )


class Requests:
    """Every request of a gateway that is in work."""

    def __init__(
        self,
        gateway_incarnation: str,
        placer: Placer,
        placement: PlacementConfig,
        limits: LimitsConfig,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._gateway_incarnation = gateway_incarnation
        self._placer = placer
        self._placement = placement
        self._limits = limits
        self._metrics = metrics
        self._counter = itertools.count(1)
        self._open: set[Generation] = set()
        self._closed: str | None = None
        self._change = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Those that no worker has accepted yet."""
        return sum(1 for generation in self._open if generation.lifetime.admitted_s is None)

    def open(self, ask: Ask, received_s: float) -> Generation:
        """Begin a request, which arrived at `received_s` of `clock`.

        Raises Overloaded if too many are in work, Unavailable once closed.
        """
        retry_after_s = self._placement.retry_after_s
        if self._closed is not None:
            raise Unavailable(self._closed, retry_after_s=retry_after_s)
        if len(self._open) >= self._limits.max_open_requests:
            self._metrics.rejection(ask.model.name)
            raise Overloaded("This gateway has too many requests in work", retry_after_s=retry_after_s)
        generation = Generation(
            f"{self._gateway_incarnation}-{next(self._counter)}",
            ask,
            self._placer,
            self._placement,
            self._metrics,
            self.clock,
            received_s,
            self._remove,
        )
        self._open.add(generation)
        self._metrics.opened(ask.model.name)
        return generation

    def close(self, reason: str) -> None:
        """Begin no more."""
        self._closed = reason

    async def ended(self, timeout_s: float) -> bool:
        """Wait until none is in work. False if some are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            return False
        return True

    def _remove(self, generation: Generation) -> None:
        self._open.discard(generation)
        self._change.set()
