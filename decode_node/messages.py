"""What goes into the decode core and what comes out of it: plain values, no generated class, no socket."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.sampling import Sampled, SamplingParams
from engine.sequence import FinishReason, Span
from kvstore.refs import PageRef
from kvstore.transport import Card


class FailureCode(enum.Enum):
    """Names are those of the wire."""

    ABORTED = "aborted"
    """Place the request again."""
    RESOURCE_EXHAUSTED = "resource_exhausted"
    INVALID = "invalid"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    node_id: str
    incarnation: str
    address: str


# Events: in. Those of `kvstore.pages.write_back` and of the transport are others.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAttempt:
    session: str
    """The gateway stream that wants the answer."""
    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    tenant_salt: bytes
    peers: tuple[PrefillPeer, ...]


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    session: str
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    session: str


@dataclass(frozen=True, slots=True)
class PeerAccepted:
    handover_id: int
    card: Card


@dataclass(frozen=True, slots=True)
class PeerPages:
    """Without pages it says only that the prefill worker is at it."""

    handover_id: int
    pages: tuple[PageRef, ...]


@dataclass(frozen=True, slots=True)
class PeerDone:
    """The prefill worker's own reads have settled, and every page was announced."""

    handover_id: int
    first: Sampled
    num_pages: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The prefill worker gave up; its own reads have settled."""

    handover_id: int
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class PeerBroken:
    """The stream ended without its last word. The peer may still be reading."""

    handover_id: int
    message: str


# Instructions: out. `kvstore.pages.OfferPages`, `kvstore.transport.Pull` and `kvstore.refs.StopPull` are others.


@dataclass(frozen=True, slots=True)
class LentPage:
    """A page of ours that the prefill worker may read while the stream is open."""

    page_index: int
    key: bytes
    page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPrefill:
    """Open a `Prefill` stream and report what comes as Peer* events.

    At last comes exactly one PeerDone, PeerFailed or PeerBroken.
    """

    handover_id: int
    peer: PrefillPeer
    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    tenant_salt: bytes
    lent: tuple[LentPage, ...]
    wanted: tuple[Span, ...]
    """Page indices."""


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    """Tell the peer to stop computing; the stream stays open."""

    handover_id: int


@dataclass(frozen=True, slots=True)
class ReleasePrefill:
    """Say `Released` and close our side: every read that we posted has settled."""

    handover_id: int


@dataclass(frozen=True, slots=True)
class Accepted:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    needed_pages: int
    room_pages: int


@dataclass(frozen=True, slots=True)
class Tokens:
    tokens: tuple[Sampled, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    cached_tokens: int
    """Prompt tokens that no worker computed for this attempt."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    pass


@dataclass(frozen=True, slots=True)
class Failed:
    code: FailureCode
    message: str


AttemptEvent = Accepted | Rejected | Tokens | Finished | Cancelled | Failed


@dataclass(frozen=True, slots=True)
class Reply:
    """Everything that one turn of the loop has for one gateway: one message."""

    session: str
    events: tuple[tuple[str, int, AttemptEvent], ...]
    """(request id, attempt number, event)"""
