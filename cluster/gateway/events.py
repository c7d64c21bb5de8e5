"""What a decode worker says about an attempt, in the gateway's own terms."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from protos import worker_pb2


class FailureCode(enum.Enum):
    """What a worker says about an attempt that it gave up."""

    ABORTED = enum.auto()
    RESOURCE_EXHAUSTED = enum.auto()
    INVALID = enum.auto()
    INTERNAL = enum.auto()


_FAILURES = {
    worker_pb2.FAILURE_CODE_ABORTED: FailureCode.ABORTED,
    worker_pb2.FAILURE_CODE_RESOURCE_EXHAUSTED: FailureCode.RESOURCE_EXHAUSTED,
    worker_pb2.FAILURE_CODE_INVALID: FailureCode.INVALID,
    worker_pb2.FAILURE_CODE_INTERNAL: FailureCode.INTERNAL,
}
_FINISHES = {worker_pb2.FINISH_REASON_STOP: "stop", worker_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Token:
    """One output token. `logprob` and `top` (token id, log probability) are there if the request asked for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Nothing was begun."""

    needed_pages: int
    room_pages: int


@dataclass(frozen=True, slots=True)
class Tokens:
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    reason: str
    """"stop" or "length"."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker, or the way to it, is gone."""

    reason: str


Ending = Rejected | Finished | Failed | Lost
Event = Accepted | Tokens | Ending


def from_proto(message: worker_pb2.AttemptEvent) -> Event | None:
    """None for a kind of event that only newer gateways know."""
    match message.WhichOneof("event"):
        case "tokens":
            return Tokens(_tokens(message.tokens))
        case "accepted":
            return Accepted(message.accepted.cached_tokens)
        case "rejected":
            return Rejected(message.rejected.needed_pages, message.rejected.room_pages)
        case "finished":
            reason = _FINISHES.get(message.finished.reason)
            if reason is None:
                return Failed(FailureCode.ABORTED, "cancelled by the worker")
            return Finished(reason, message.finished.cached_tokens)
        case "failed":
            return Failed(_FAILURES.get(message.failed.code, FailureCode.INTERNAL), message.failed.message)
        case _:
            return None


def _tokens(message: worker_pb2.AttemptTokens) -> tuple[Token, ...]:
    if not message.logprobs:
        return tuple(Token(token_id) for token_id in message.token_ids)
    return tuple(
        Token(token_id, logprobs.logprob, tuple((top.token_id, top.logprob) for top in logprobs.top))
        for token_id, logprobs in zip(message.token_ids, message.logprobs, strict=True)
    )
