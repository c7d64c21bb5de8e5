"""One attempt at a request, and its handover to a prefill worker:

what was lent, what is being pulled, when both are over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from decode_node.messages import PeerDone, PrefillPeer, StartAttempt
from engine.sequence import Sequence
from kvstore.transport import Card


@dataclass(eq=False, slots=True, kw_only=True)
class Attempt:
    """An admitted attempt; it ends in exactly one of Finished, Cancelled and Failed."""

    start: StartAttempt
    sequence: Sequence
    peers: deque[PrefillPeer]
    """Prefill workers that have not been asked."""
    handover: Handover | None = None
    """While pages are awaited from a prefill worker."""
    prefill_computed_tokens: int | None = None
    """Prompt positions that the prefill worker computed; None if there was none."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that no worker computed."""
        if self.prefill_computed_tokens is not None:
            return max(len(self.start.token_ids) - self.prefill_computed_tokens, 0)
        return self.sequence.cached_tokens


@dataclass(eq=False, slots=True, kw_only=True)
class Handover:
    """
        asked --PeerAccepted--> open --PeerPages*--> open --PeerDone, all pages landed--> detached
          |                      |                                                          |
          +-- PeerFailed, PeerBroken, cancel, failed or expired pull ------> detached ------+
                                                                                            |
              released: our reads have settled ---------- both ---------> forgotten <-------+
              returned: the peer's reads have settled, or grace is over

    While it has an attempt it works for it. Detached, it only waits for reads to settle, in both directions.
    """

    handover_id: int
    peer: PrefillPeer
    attempt: Attempt | None
    lent_pages: tuple[int, ...]
    """Pinned LEASE_OUT until returned."""
    heard_s: float
    """When the peer last said something."""
    card: Card | None = None
    announced: set[int] = field(default_factory=set)
    """Page indices."""
    pulls: set[int] = field(default_factory=set)
    """Ids of the pulls that have not settled."""
    done: PeerDone | None = None
    peer_ended: bool = False
    """PeerDone or PeerFailed: the peer reads no more."""
    broken_at_s: float | None = None
    released: bool = False
    returned: bool = False


@dataclass(eq=False, slots=True)
class Landing:
    """A pull that has not settled, and where its pages were meant to go."""

    handover: Handover
    sequence: Sequence
    targets: tuple[tuple[int, int], ...]
    """(page index, page id)"""
