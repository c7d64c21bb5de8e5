"""What goes into the prefill core and what comes out of it: plain values, no generated class, no socket."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sampling import Sampled, SamplingParams
from engine.sequence import Span
from kvstore.refs import PageRef
from kvstore.transport import Card

# Events: in. Those of `kvstore.pages.write_back` and of the transport are others.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartHandover:
    """A decode worker wants a prompt computed. It lends `held` while the stream is open."""

    handover: str
    """Name of the stream."""
    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    tenant_salt: bytes
    held: tuple[PageRef, ...]
    card: Card
    wanted: tuple[Span, ...]
    """Page indices."""


@dataclass(frozen=True, slots=True)
class CancelHandover:
    """The decode worker wants no more; it still reads what it began to read."""

    handover: str


@dataclass(frozen=True, slots=True)
class HandoverReleased:
    """Every read that the decode worker posted has settled."""

    handover: str


@dataclass(frozen=True, slots=True)
class HandoverBroken:
    """The stream ended without `HandoverReleased`: the decode worker may still be reading."""

    handover: str


@dataclass(frozen=True, slots=True)
class FetchExpired:
    """The deadline passed; the pages are not free before `FetchSettled`."""

    fetch_id: int


@dataclass(frozen=True, slots=True)
class FetchSettled:
    """Nothing of this fetch lands any more."""

    fetch_id: int
    filled: frozenset[int]
    """Page ids that hold the right bytes, in time."""


# Instructions: out. `kvstore.pages.OfferPages`, `kvstore.transport.Pull` and `kvstore.refs.StopPull` are others.


@dataclass(frozen=True, slots=True)
class Accept:
    handover: str


@dataclass(frozen=True, slots=True)
class ReadyPage:
    page_index: int
    key: bytes
    """Empty for a partly filled last page."""
    page: int
    valid_tokens: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Send these pages' refs, with digests. Their values are final, and they are pinned."""

    handover: str
    pages: tuple[ReadyPage, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """The last word, after all announcements."""

    handover: str
    first: Sampled
    num_pages: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The last word. `code` is one of the wire's names in lower case."""

    handover: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class StoredTarget:
    """A page that may be on a storage node, and the page of ours that it goes to."""

    key: bytes
    page: int


@dataclass(frozen=True, slots=True)
class FetchStored:
    """Look these up in the KV store, pull and decode what is there; report FetchExpired and FetchSettled."""

    fetch_id: int
    keys: tuple[bytes, ...]
    """Of the whole prefix, from the first page: they decide which node owns what."""
    targets: tuple[StoredTarget, ...]
    deadline_s: float
