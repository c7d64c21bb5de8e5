"""What a prefill worker decides: admission, where each page comes from, what is announced, when pages may go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass
from typing import Literal

from engine.core import EngineCore, NoRoom, StepOutput, StepReport
from engine.sequence import Sequence
from engine.stats import Rates, WorkerStats, worker_stats
from kvstore.pages import EvictPrefixes, OfferPages, OfferSettled, PinKind, StorageChanged, WriteBack, salted
from kvstore.refs import PageRef, StopPull, pull_of
from kvstore.transport import Pull, PullExpired, PullSettled
from prefill_node.job import Job, JobState, Landing
from prefill_node.messages import (
    Accept,
    Announce,
    CancelHandover,
    Complete,
    Fail,
    FetchExpired,
    FetchSettled,
    FetchStored,
    HandoverBroken,
    HandoverReleased,
    ReadyPage,
    StartHandover,
    StoredTarget,
)

Instruction = Accept | Announce | Complete | Fail | Pull | StopPull | FetchStored | OfferPages


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCoreConfig:
    max_waiting: int = 256
    """Handovers that may wait for room; further ones are refused."""
    pull_deadline_s: float = 5.0
    """Seconds for pages to come from a decode worker or a storage node; what has not come by then is computed."""
    grace_s: float = 10.0
    """Seconds for which announced pages stay after a stream broke: the decode worker may still be reading."""
    fetch: Literal["auto", "always", "never"] = "auto"
    """Whether missing pages are fetched from storage nodes: where that is predicted to be faster, or without asking."""

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting must be >= 1, got {self.max_waiting}")
        for name in ("pull_deadline_s", "grace_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


class PrefillCore:
    """Events in by `handle`, time passes by `step`, instructions out by `take_instructions`. Owned by the step loop.

    A prompt's pages come from its own tree, from the decode worker that asks (it may hold earlier pages, and the last
    answer's exist only there), from storage nodes, or are computed: only the missing spans are.
    """

    def __init__(self, engine: EngineCore, write_back: WriteBack, config: PrefillCoreConfig, namespace: bytes) -> None:
        self.engine = engine
        self.write_back = write_back
        self.config = config
        self.rates = Rates()
        self.pull_bytes_per_s = 0.0
        """Set by the worker, which measures it; 0 while unknown."""
        self._namespace = namespace
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._by_sequence: dict[int, Job] = {}
        self._landings: dict[int, Landing] = {}
        self._next_id = 1
        self._instructions: list[Instruction] = []
        self._report = StepReport((), 0, 0)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._by_sequence)

    @property
    def queued_tokens(self) -> int:
        """Prompt positions before a new request, as far as it is known."""
        return self.engine.queued_tokens + sum(len(job.start.token_ids) for job in self._waiting)

    @property
    def is_idle(self) -> bool:
        """No job, no pull, no offer: every page is free or in the tree."""
        return not (self._jobs or self._landings or self.write_back.num_inflight)

    def take_instructions(self) -> list[Instruction]:
        taken, self._instructions = self._instructions, []
        return taken

    def handle(self, event: object, now_s: float) -> None:
        match event:
            case StartHandover():
                self._start(event, now_s)
            case CancelHandover():
                if (job := self._jobs.get(event.handover)) is not None:
                    self._stop(job, ("aborted", "cancelled"))
            case HandoverReleased():
                if (job := self._jobs.get(event.handover)) is not None:
                    job.released = True
                    self._stop(job, ("aborted", "released before the end"))
                    self._unlease(job)
                    self._forget_if_over(job)
            case HandoverBroken():
                if (job := self._jobs.get(event.handover)) is not None:
                    job.broken_at_s = now_s
                    self._stop(job, ("aborted", "stream broken"))
            case PullExpired(pull_id=landing_id) | FetchExpired(fetch_id=landing_id):
                self._expired(landing_id)
            case PullSettled():
                nothing: frozenset[int] = frozenset()
                filled = None if event.error is None else nothing
                self._settled(event.pull_id, filled, frozenset(event.mismatched))
            case FetchSettled():
                self._settled(event.fetch_id, event.filled, frozenset())
            case OfferSettled() | StorageChanged() | EvictPrefixes():
                self.write_back.handle(event)
            case _:
                raise TypeError(f"not an event of a prefill worker: {event!r}")
        self._admit(now_s)

    def step(self, now_s: float) -> None:
        """One step of the model over the prompts in flight, then what is due."""
        self._report = self.engine.step()
        for output in self._report.outputs:
            self._output(output)
        for job in list(self._jobs.values()):
            if job.broken_at_s is not None and now_s >= job.broken_at_s + self.config.grace_s:
                self._unlease(job)
                job.released = True
                self._forget_if_over(job)
        self._admit(now_s)
        self._instructions.extend(self.write_back.due(self.engine.room_pages))

    def measured(self, seconds: float) -> None:
        self.rates.measured(self._report, seconds)

    def stats(self) -> WorkerStats:
        """For the step loop's thread."""
        lost = [page for job in self._jobs.values() if job.broken_at_s is not None for page in job.leased]
        return worker_stats(
            self.engine,
            self.write_back,
            self.rates,
            running=self.num_running,
            waiting=self.num_waiting,
            queued_tokens=self.queued_tokens,
            held_for_the_lost=lost,
        )

    # From waiting to computing.

    def _start(self, start: StartHandover, now_s: float) -> None:
        if start.handover in self._jobs:
            return  # Sent twice.
        job = Job(start=start, wanted={index for span in start.wanted for index in range(*span)})
        self._jobs[start.handover] = job
        self._instructions.append(Accept(start.handover))
        if len(self._waiting) >= self.config.max_waiting:
            self._stop(job, ("resource_exhausted", f"{len(self._waiting)} prompts are waiting"))
        else:
            self._waiting.append(job)

    def _admit(self, now_s: float) -> None:
        """Give room to those who wait, in order of arrival."""
        while self._waiting:
            job = self._waiting[0]
            start = job.start
            try:
                job.sequence = self.engine.open(
                    start.request_id,
                    start.token_ids,
                    start.num_prompt_tokens,
                    start.params,
                    namespace=salted(self._namespace, start.tenant_salt),
                    growth_tokens=0,
                )
            except NoRoom:
                return
            except ValueError as error:
                self._stop(job, ("invalid", str(error)))
                continue
            self._waiting.popleft()
            self._by_sequence[job.sequence.arrival] = job
            self._gather(job, job.sequence, now_s)

    def _gather(self, job: Job, sequence: Sequence, now_s: float) -> None:
        """Ask the decode worker and the storage nodes for what the tree lacks."""
        job.state = JobState.GATHERING
        self._announce_present(job, sequence)
        deadline_s = now_s + self.config.pull_deadline_s
        lacking = [index for index in sorted(sequence.missing) if index < len(sequence.keys)]
        held = {ref.page_index: ref for ref in job.start.held if self._is_page_of(sequence, ref)}
        lent = [held[index] for index in lacking if index in held]
        if lent:
            targets = [(ref.page_index, self.engine.expect(sequence, ref.page_index)) for ref in lent]
            offsets = [self.engine.cache.offset_bytes(page) for _, page in targets]
            pull = pull_of(lent, offsets, pull_id=self._new_id(), card=job.start.card, deadline_s=deadline_s)
            job.reads.add(pull.pull_id)
            self._await(job, sequence, pull.pull_id, targets)
            self._instructions.append(pull)
        stored = [index for index in lacking if index not in held]
        if stored and self.write_back.has_storage and self._fetch_pays(len(stored)):
            targets = [(index, self.engine.expect(sequence, index)) for index in stored]
            fetch_id = self._new_id()
            self._await(job, sequence, fetch_id, targets)
            wanted = tuple(StoredTarget(sequence.keys[index], page) for index, page in targets)
            self._instructions.append(FetchStored(fetch_id, tuple(sequence.keys), wanted, deadline_s))
        if not job.awaited:
            self._compute(job, sequence)

    def _is_page_of(self, sequence: Sequence, ref: PageRef) -> bool:
        """Whether this lent page is what we would compute; refs come from another process."""
        layout = self.engine.cache.layout
        return (
            ref.page_index < len(sequence.keys)
            and ref.key == sequence.keys[ref.page_index]
            and ref.num_bytes == layout.page_bytes
            and len(ref.digests) == layout.num_kv_heads
        )

    def _fetch_pays(self, num_pages: int) -> bool:
        """Whether pulling is predicted to be faster than computing.

        Unmeasured: fetch, since computing costs more nearly always.
        """
        if self.config.fetch != "auto":
            return self.config.fetch == "always"
        if not self.pull_bytes_per_s or not self.rates.prefill.per_s:
            return True
        layout = self.engine.cache.layout
        pull_s = num_pages * layout.page_bytes / self.pull_bytes_per_s
        return pull_s < num_pages * layout.page_size / self.rates.prefill.per_s

    def _await(self, job: Job, sequence: Sequence, landing_id: int, targets: ReadOnlyList[tuple[int, int]]) -> None:
        job.awaited.add(landing_id)
        self._landings[landing_id] = Landing(job, sequence, tuple(targets))

    def _compute(self, job: Job, sequence: Sequence) -> None:
        """Nothing more is awaited: compute the rest."""
        job.state = JobState.COMPUTING
        self.engine.compute(sequence)

    def _output(self, output: StepOutput) -> None:
        job = self._by_sequence[output.sequence.arrival]
        sequence = output.sequence
        if output.error is not None:
            self._stop(job, ("internal", output.error))
            return
        self._announce(job, sequence, [index for index in output.final_pages if index in job.wanted])
        if output.token is None:
            return
        sequence.pending.clear()
        num_tokens = len(job.start.token_ids)
        last = (num_tokens - 1) // self.engine.page_size
        if last in job.wanted:
            self._announce(job, sequence, [last], self.engine.seal_tail(sequence, num_tokens))
        job.first = output.token
        self._leave(job)

    def _announce_present(self, job: Job, sequence: Sequence) -> None:
        self._announce(job, sequence, [index for index in sorted(job.wanted) if index not in sequence.missing])

    def _announce(
        self, job: Job, sequence: Sequence, indices: ReadOnlyList[int], valid_tokens: int | None = None
    ) -> None:
        """Pin these final pages and tell the decode worker. `valid_tokens` is given for a partly filled page alone."""
        if not indices:
            return
        pages: list[ReadyPage] = []
        for index in indices:
            page = sequence.block_table[index]
            self.engine.cache.ledger.pin(page, PinKind.LEASE_OUT)
            job.leased.append(page)
            key = sequence.keys[index] if valid_tokens is None else b""
            pages.append(ReadyPage(index, key, page, valid_tokens or self.engine.page_size))
            job.wanted.discard(index)
        job.num_announced += len(pages)
        self._instructions.append(Announce(job.start.handover, tuple(pages)))

    # Pages from elsewhere.

    def _expired(self, landing_id: int) -> None:
        """Compute what has not come. Its pages stay quarantined until the pull settles."""
        landing = self._landings.get(landing_id)
        if landing is None or landing_id not in landing.job.awaited:
            return
        job, sequence = landing.job, landing.sequence
        job.awaited.discard(landing_id)
        if not all(self.engine.abandon(sequence, index) for index, _ in landing.targets):
            self._stop(job, ("resource_exhausted", "no room for pages that came too late"))
        elif not job.awaited:
            self._compute(job, sequence)

    def _settled(self, landing_id: int, filled: frozenset[int] | None, mismatched: frozenset[int]) -> None:
        """filled: page ids that hold the right bytes; None: all but the `mismatched` places."""
        landing = self._landings.pop(landing_id, None)
        if landing is None:
            return
        job, sequence = landing.job, landing.sequence
        for place, (index, page) in enumerate(landing.targets):
            counts = place not in mismatched if filled is None else page in filled
            self.engine.landed(sequence, index, page, counts=counts)
        job.reads.discard(landing_id)
        if job.state is JobState.GATHERING:
            self._announce_present(job, sequence)
        if landing_id in job.awaited:
            job.awaited.discard(landing_id)
            if not job.awaited and job.state is JobState.GATHERING:
                self._compute(job, sequence)
        if job.state is JobState.SETTLING:
            self._say_last_word(job)
        self._forget_if_over(job)

    # The end.

    def _stop(self, job: Job, failure: tuple[str, str]) -> None:
        """Compute no further. Without effect once the first token is there or an earlier failure was noted."""
        if job.state in (JobState.SETTLING, JobState.ENDED):
            return
        if job.state is JobState.WAITING and job in self._waiting:
            self._waiting.remove(job)
        job.failure = failure
        self._instructions.extend(StopPull(pull_id) for pull_id in sorted(job.reads))
        self._leave(job)

    def _leave(self, job: Job) -> None:
        """Its room goes to the next one. What was announced stays pinned by its lease."""
        if job.sequence is not None:
            del self._by_sequence[job.sequence.arrival]
            self.engine.close(job.sequence)
        job.awaited.clear()
        job.state = JobState.SETTLING
        self._say_last_word(job)

    def _say_last_word(self, job: Job) -> None:
        """Once no read from the decode worker is under way: it may take its pages back on hearing this."""
        if job.reads:
            return
        job.state = JobState.ENDED
        if job.broken_at_s is not None:
            return  # Nobody listens.
        handover = job.start.handover
        if job.first is not None:
            assert job.sequence is not None
            self._instructions.append(Complete(handover, job.first, job.num_announced, job.sequence.computed_tokens))
        else:
            assert job.failure is not None
            self._instructions.append(Fail(handover, *job.failure))

    def _unlease(self, job: Job) -> None:
        for page in job.leased:
            self.engine.cache.ledger.unpin(page, PinKind.LEASE_OUT)
        job.leased.clear()

    def _forget_if_over(self, job: Job) -> None:
        if job.released and job.state is JobState.ENDED and not job.reads:
            self._jobs.pop(job.start.handover, None)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
