"""What a decode worker decides: admission, whom to ask for the prompt's pages, what counts, when to let go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass

from decode_node.attempt import Attempt, Handover, Landing
from decode_node.messages import (
    Accepted,
    AskPrefill,
    AttemptEvent,
    CancelAttempt,
    Cancelled,
    CancelPrefill,
    Failed,
    FailureCode,
    Finished,
    LentPage,
    PeerAccepted,
    PeerBroken,
    PeerDone,
    PeerFailed,
    PeerPages,
    Rejected,
    ReleasePrefill,
    Reply,
    SessionLost,
    StartAttempt,
    Tokens,
)
from engine.core import EngineCore, NoRoom, StepOutput, StepReport
from engine.sequence import FinishReason, Sequence, merged_spans
from engine.stats import Rates, WorkerStats, worker_stats
from kvstore.pages import EvictPrefixes, OfferPages, OfferSettled, PinKind, StorageChanged, WriteBack, salted
from kvstore.refs import PageRef, StopPull, pull_of
from kvstore.transport import Pull, PullExpired, PullSettled

Instruction = AskPrefill | CancelPrefill | ReleasePrefill | Pull | StopPull | OfferPages | Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCoreConfig:
    local_prefill_max_tokens: int = 64
    """Prompts with at most this many uncached tokens are computed here, without a prefill worker."""
    pull_deadline_s: float = 5.0
    """Seconds from an announcement to the landing of its pages; then the next prefill worker is asked."""
    grace_s: float = 10.0
    """Seconds for which lent pages stay after a stream broke: the peer may still be reading."""
    peer_silence_s: float = 30.0
    """Seconds without a message after which a prefill worker is given up; a working one says something every 5."""

    def __post_init__(self) -> None:
        if self.local_prefill_max_tokens < 0:
            raise ValueError(f"local_prefill_max_tokens must be >= 0, got {self.local_prefill_max_tokens}")
        for name in ("pull_deadline_s", "grace_s", "peer_silence_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


class DecodeCore:
    """Events in by `handle`, time passes by `step`, instructions out by `take_instructions`. Owned by the step loop.

    The prompt's pages come from its own tree, from prefill workers in the order given, or are computed here. A page
    counts once its pull has settled in time and its digests match; what counted stays when a prefill worker fails, and
    the next one is asked for the complement. After the last one the attempt ends with ABORTED, and the gateway places
    it again.
    """

    def __init__(self, engine: EngineCore, write_back: WriteBack, config: DecodeCoreConfig, namespace: bytes) -> None:
        self.engine = engine
        self.write_back = write_back
        self.config = config
        self.rates = Rates()
        self._namespace = namespace
        self._attempts: dict[str, Attempt] = {}
        self._by_sequence: dict[int, Attempt] = {}
        self._handovers: dict[int, Handover] = {}
        self._landings: dict[int, Landing] = {}
        self._next_id = 1
        self._instructions: list[Instruction] = []
        self._replies: dict[str, list[tuple[str, int, AttemptEvent]]] = {}
        self._report = StepReport((), 0, 0)
        self._tokens_generated = 0

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    @property
    def num_waiting(self) -> int:
        """Attempts whose pages are not all here."""
        return sum(attempt.handover is not None for attempt in self._attempts.values())

    @property
    def num_running(self) -> int:
        return len(self._attempts) - self.num_waiting

    @property
    def is_idle(self) -> bool:
        """No attempt, no handover, no pull, no offer: every page is free or in the tree."""
        return not (self._attempts or self._handovers or self._landings or self.write_back.num_inflight)

    def take_instructions(self) -> list[Instruction]:
        taken, self._instructions = self._instructions, []
        taken.extend(Reply(session, tuple(events)) for session, events in self._replies.items())
        self._replies = {}
        return taken

    def handle(self, event: object, now_s: float) -> None:
        match event:
            case StartAttempt():
                self._start(event, now_s)
            case CancelAttempt():
                attempt = self._attempts.get(event.request_id)
                if attempt is not None and attempt.start.attempt == event.attempt:
                    self._end(attempt, Cancelled(), now_s)
            case SessionLost():
                for attempt in [a for a in self._attempts.values() if a.start.session == event.session]:
                    self._end(attempt, Cancelled(), now_s)
                self._replies.pop(event.session, None)
            case PeerAccepted() | PeerPages() | PeerDone() | PeerFailed() | PeerBroken():
                self._from_peer(event, now_s)
            case PullExpired():
                self._pull_expired(event, now_s)
            case PullSettled():
                self._pull_settled(event, now_s)
            case OfferSettled() | StorageChanged() | EvictPrefixes():
                self.write_back.handle(event)
            case _:
                raise TypeError(f"not an event of a decode worker: {event!r}")

    def step(self, now_s: float) -> None:
        """One step of the model over all streams, then what is due."""
        self._report = self.engine.step()
        for output in self._report.outputs:
            self._output(output, now_s)
        for handover in list(self._handovers.values()):
            if handover.attempt is not None and now_s >= handover.heard_s + self.config.peer_silence_s:
                self._fail(handover, f"prefill worker {handover.peer.node_id} is silent", now_s)
            self._let_go(handover, now_s)
        self._instructions.extend(self.write_back.due(self.engine.room_pages))

    def measured(self, seconds: float) -> None:
        self.rates.measured(self._report, seconds)

    def stats(self) -> WorkerStats:
        """For the step loop's thread."""
        lost = [h for h in self._handovers.values() if h.broken_at_s is not None and not h.returned]
        return worker_stats(
            self.engine,
            self.write_back,
            self.rates,
            running=self.num_running,
            waiting=self.num_waiting,
            queued_tokens=self.engine.queued_tokens,
            tokens_generated=self._tokens_generated,
            held_for_the_lost=[page for handover in lost for page in handover.lent_pages],
        )

    # Attempts.

    def _start(self, start: StartAttempt, now_s: float) -> None:
        current = self._attempts.get(start.request_id)
        if current is not None:
            if current.start.attempt >= start.attempt:
                return  # Sent twice, or overtaken by a newer attempt.
            self._end(current, Cancelled(), now_s)
        num_tokens = len(start.token_ids)
        num_output = num_tokens - start.num_prompt_tokens
        growth = start.params.max_tokens - num_output
        if start.params.max_tokens == 0:
            growth = self.engine.config.growth_reserve_tokens
        try:
            sequence = self.engine.open(
                start.request_id,
                start.token_ids,
                start.num_prompt_tokens,
                start.params,
                namespace=salted(self._namespace, start.tenant_salt),
                growth_tokens=max(growth, 1),
            )
        except NoRoom as error:
            self._reply(start, Rejected(error.needed_pages, error.room_pages))
            return
        except ValueError as error:
            self._reply(start, Failed(FailureCode.INVALID, str(error)))
            return
        attempt = Attempt(start=start, sequence=sequence, peers=deque(start.peers))
        self._attempts[start.request_id] = attempt
        self._by_sequence[sequence.arrival] = attempt
        self._reply(start, Accepted(sequence.cached_tokens))
        if not start.peers or num_tokens - sequence.cached_tokens <= self.config.local_prefill_max_tokens:
            self.engine.compute(sequence)
        else:
            self._ask_next_peer(attempt, Failed(FailureCode.ABORTED, "no prefill worker was asked"), now_s)

    def _output(self, output: StepOutput, now_s: float) -> None:
        attempt = self._by_sequence[output.sequence.arrival]
        if output.preempted:
            self._end(attempt, Failed(FailureCode.ABORTED, "preempted: older requests needed its pages"), now_s)
        elif output.error is not None:
            self._end(attempt, Failed(FailureCode.INTERNAL, output.error), now_s)
        elif output.token is not None:
            if output.finish is not FinishReason.STOP:
                self._tokens_generated += 1
                self._reply(attempt.start, Tokens((output.token,)))
            if output.finish is not None:
                self._end(attempt, Finished(output.finish, attempt.cached_tokens), now_s)

    def _end(self, attempt: Attempt, last: Finished | Cancelled | Failed, now_s: float) -> None:
        """The attempt's one terminal event.

        Its pages are free at once, but for those that a pull may still write to.
        """
        del self._attempts[attempt.start.request_id]
        del self._by_sequence[attempt.sequence.arrival]
        self.engine.close(attempt.sequence)
        if attempt.handover is not None:
            self._detach(attempt, attempt.handover, now_s)
        self._reply(attempt.start, last)

    def _reply(self, start: StartAttempt, event: AttemptEvent) -> None:
        self._replies.setdefault(start.session, []).append((start.request_id, start.attempt, event))

    # Handovers.

    def _ask_next_peer(self, attempt: Attempt, otherwise: Failed, now_s: float) -> None:
        """Ask for the complement of what is here; end with `otherwise` where nobody is left to ask."""
        if not attempt.peers:
            self._end(attempt, otherwise, now_s)
            return
        sequence, start = attempt.sequence, attempt.start
        lent = tuple(
            LentPage(index, sequence.keys[index], sequence.block_table[index])
            for index in range((len(start.token_ids) - 1) // self.engine.page_size)  # The last page is computed anyway.
            if index not in sequence.missing
        )
        for entry in lent:
            self.engine.cache.ledger.pin(entry.page, PinKind.LEASE_OUT)
        handover = Handover(
            handover_id=self._new_id(),
            peer=attempt.peers.popleft(),
            attempt=attempt,
            lent_pages=tuple(entry.page for entry in lent),
            heard_s=now_s,
        )
        self._handovers[handover.handover_id] = handover
        attempt.handover = handover
        self._instructions.append(
            AskPrefill(
                handover_id=handover.handover_id,
                peer=handover.peer,
                request_id=start.request_id,
                attempt=start.attempt,
                token_ids=start.token_ids,
                num_prompt_tokens=start.num_prompt_tokens,
                params=start.params,
                tenant_salt=start.tenant_salt,
                lent=lent,
                wanted=tuple(merged_spans(sequence.missing, 1, len(sequence.block_table))),
            )
        )

    def _from_peer(self, event: PeerAccepted | PeerPages | PeerDone | PeerFailed | PeerBroken, now_s: float) -> None:
        handover = self._handovers.get(event.handover_id)
        if handover is None:
            return
        handover.heard_s = now_s
        match event:
            case PeerAccepted():
                handover.card = event.card
                if event.card.incarnation != handover.peer.incarnation:
                    self._fail(handover, f"prefill worker {handover.peer.node_id} was replaced", now_s)
            case PeerPages():
                self._pages_ready(handover, event, now_s)
            case PeerDone():
                handover.peer_ended = True
                handover.done = event
                self._complete_if_whole(handover, now_s)
            case PeerFailed():
                handover.peer_ended = True
                self._fail(handover, f"prefill worker {handover.peer.node_id}: {event.message}", now_s, event.code)
            case PeerBroken():
                handover.broken_at_s = now_s
                if handover.done is None:
                    self._fail(handover, f"lost prefill worker {handover.peer.node_id}: {event.message}", now_s)
        self._let_go(handover, now_s)

    def _pages_ready(self, handover: Handover, event: PeerPages, now_s: float) -> None:
        attempt = handover.attempt
        if attempt is None or not event.pages:
            return
        if (problem := self._problem(attempt.sequence, handover, event.pages)) is not None:
            self._fail(handover, f"prefill worker {handover.peer.node_id}: {problem}", now_s)
            return
        assert handover.card is not None
        handover.announced.update(ref.page_index for ref in event.pages)
        refs = [ref for ref in event.pages if ref.page_index in attempt.sequence.missing]
        if not refs:
            return
        targets = [(ref.page_index, self.engine.expect(attempt.sequence, ref.page_index)) for ref in refs]
        pull = pull_of(
            refs,
            [self.engine.cache.offset_bytes(page) for _, page in targets],
            pull_id=self._new_id(),
            card=handover.card,
            deadline_s=now_s + self.config.pull_deadline_s,
        )
        handover.pulls.add(pull.pull_id)
        self._landings[pull.pull_id] = Landing(handover, attempt.sequence, tuple(targets))
        self._instructions.append(pull)

    def _problem(self, sequence: Sequence, handover: Handover, refs: ReadOnlyList[PageRef]) -> str | None:
        """Why these announcements cannot be of this request; they come from another process."""
        layout, num_tokens = self.engine.cache.layout, len(sequence.token_ids)
        if handover.card is None:
            return "announced pages before its card"
        indices = {ref.page_index for ref in refs}
        if len(indices) < len(refs) or indices & handover.announced:
            return "announced a page twice"
        for ref in refs:
            index = ref.page_index
            if index >= len(sequence.block_table):
                return f"announced page {index} of {len(sequence.block_table)}"
            valid = min(layout.page_size, num_tokens - index * layout.page_size)
            if (
                ref.num_bytes != layout.page_bytes
                or len(ref.digests) != layout.num_kv_heads
                or ref.valid_tokens != valid
            ):
                return f"page {index} has another layout"
            if index < len(sequence.keys) and ref.key != sequence.keys[index]:
                return f"page {index} has another key"
        return None

    def _complete_if_whole(self, handover: Handover, now_s: float) -> None:
        """Start decoding if the last word was said and every page counts."""
        attempt = handover.attempt
        if attempt is None or handover.done is None or handover.pulls:
            return
        sequence = attempt.sequence
        if sequence.missing or len(handover.announced) != handover.done.num_pages:
            self._fail(handover, f"prefill worker {handover.peer.node_id} announced too few pages", now_s)
            return
        attempt.prefill_computed_tokens = handover.done.computed_tokens
        self._detach(attempt, handover, now_s)
        finish = self.engine.start_decoding(sequence, handover.done.first)
        self._output(StepOutput(sequence, token=handover.done.first, finish=finish), now_s)

    def _fail(self, handover: Handover, why: str, now_s: float, code: FailureCode = FailureCode.ABORTED) -> None:
        """Keep what counted and ask the next prefill worker for the rest; but not where it would fail there too."""
        attempt = handover.attempt
        if attempt is None:
            return
        if code in (FailureCode.INVALID, FailureCode.INTERNAL):
            self._end(attempt, Failed(code, why), now_s)
            return
        whole = all(
            self.engine.abandon(attempt.sequence, index)
            for pull_id in handover.pulls
            for index, page in self._landings[pull_id].targets
            if attempt.sequence.block_table[index] == page
        )
        self._detach(attempt, handover, now_s)
        if whole:
            self._ask_next_peer(attempt, Failed(code, why), now_s)
        else:
            self._end(attempt, Failed(FailureCode.ABORTED, f"{why}; no room to ask another"), now_s)

    def _detach(self, attempt: Attempt, handover: Handover, now_s: float) -> None:
        attempt.handover = handover.attempt = None
        if not handover.peer_ended and handover.broken_at_s is None:
            self._instructions.append(CancelPrefill(handover.handover_id))
        self._instructions.extend(StopPull(pull_id) for pull_id in sorted(handover.pulls))
        self._let_go(handover, now_s)

    def _let_go(self, handover: Handover, now_s: float) -> None:
        """Release the peer's pages once our reads have settled; take ours back once its have, or grace is over."""
        if handover.attempt is not None:
            return
        if not handover.pulls and not handover.released:
            handover.released = True
            if handover.broken_at_s is None:
                self._instructions.append(ReleasePrefill(handover.handover_id))
        broken = handover.broken_at_s is not None and now_s >= handover.broken_at_s + self.config.grace_s
        if (handover.peer_ended or broken) and not handover.returned:
            handover.returned = True
            for page in handover.lent_pages:
                self.engine.cache.ledger.unpin(page, PinKind.LEASE_OUT)
        if handover.released and handover.returned:
            self._handovers.pop(handover.handover_id, None)

    # Pulls.

    def _pull_expired(self, event: PullExpired, now_s: float) -> None:
        landing = self._landings.get(event.pull_id)
        if landing is not None:
            handover = landing.handover
            self._fail(handover, f"pages from prefill worker {handover.peer.node_id} came too late", now_s)

    def _pull_settled(self, event: PullSettled, now_s: float) -> None:
        landing = self._landings.pop(event.pull_id, None)
        if landing is None:
            return
        handover = landing.handover
        handover.pulls.discard(event.pull_id)
        whole = event.error is None and not event.mismatched
        for place, (index, page) in enumerate(landing.targets):
            counts = event.error is None and place not in event.mismatched
            self.engine.landed(landing.sequence, index, page, counts=counts)
        if whole:
            self._complete_if_whole(handover, now_s)
        else:
            why = event.error or "digests differ"
            self._fail(handover, f"pages from prefill worker {handover.peer.node_id}: {why}", now_s)
        self._let_go(handover, now_s)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
