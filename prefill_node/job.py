"""One handover on the prefill side:

where the prompt's pages come from, what was announced, when it may be forgotten.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine.sampling import Sampled
from engine.sequence import Sequence
from prefill_node.messages import StartHandover


class JobState(enum.Enum):
    WAITING = "waiting"
    """For room."""
    GATHERING = "gathering"
    """Pages come from the decode worker or from storage nodes."""
    COMPUTING = "computing"
    SETTLING = "settling"
    """Computed, failed or cancelled; its own reads from the decode worker have not all settled."""
    ENDED = "ended"
    """The last word was said."""


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """
        WAITING --room--> GATHERING --settled or expired--> COMPUTING --first token--> SETTLING --reads settled--> ENDED
           |                  |                                 |                         ^
           +------------------+------- cancel, error -----------+-------------------------+

    Announced pages are pinned LEASE_OUT from the announcement until the decode worker says that its reads have settled,
    or until `grace_s` after the stream broke. The job is forgotten after both ends' reads.
    """

    start: StartHandover
    state: JobState = JobState.WAITING
    sequence: Sequence | None = None
    wanted: set[int] = field(default_factory=set)
    """Page indices that the decode worker needs and that were not announced yet."""
    leased: list[int] = field(default_factory=list)
    """Page ids, pinned LEASE_OUT."""
    num_announced: int = 0
    reads: set[int] = field(default_factory=set)
    """Pulls from the decode worker that have not settled."""
    awaited: set[int] = field(default_factory=set)
    """Pulls and fetches whose pages the computation still waits for."""
    first: Sampled | None = None
    failure: tuple[str, str] | None = None
    """(code, message)"""
    released: bool = False
    broken_at_s: float | None = None


@dataclass(eq=False, slots=True)
class Landing:
    """A pull or fetch that has not settled, and where its pages were meant to go."""

    job: Job
    sequence: Sequence
    targets: tuple[tuple[int, int], ...]
    """(page index, page id)"""
