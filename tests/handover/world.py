"""A decode worker and two prefill workers in one thread, and everything between them under the test's control.

The cores, the model, the pools and the digests are the real ones. What is played here is the outside: streams that
deliver in order but late, or break; pulls that settle late, with an error or with damaged bytes; processes that die and
come back empty; time. It cannot show that gRPC and NIXL behave like that: `tests/system` and `tests/kvstore/transport`
do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from decode_node.core import DecodeCore, DecodeCoreConfig
from decode_node.messages import (
    Accepted,
    AskPrefill,
    CancelAttempt,
    Cancelled,
    CancelPrefill,
    Failed,
    FailureCode,
    Finished,
    PeerAccepted,
    PeerBroken,
    PeerDone,
    PeerFailed,
    PeerPages,
    PrefillPeer,
    Rejected,
    ReleasePrefill,
    Reply,
    StartAttempt,
    Tokens,
)
from engine.core import EngineConfig, EngineCore
from engine.model import Model
from engine.sampling import SamplingParams
from engine.sequence import FinishReason
from kvstore.pages import (
    OfferPages,
    OfferSettled,
    Owner,
    PageCache,
    PinKind,
    StorageChanged,
    WriteBack,
    WriteBackConfig,
    allocate_region,
    page_digests,
)
from kvstore.refs import PageRef, StopPull
from kvstore.transport import Card, Pull, PullExpired, PullSettled
from prefill_node.core import PrefillCore, PrefillCoreConfig
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
    StartHandover,
)

PAGE_SIZE = 4
NUM_PAGES = 24
GRACE_S = 10.0
DEADLINE_S = 5.0
NAMESPACE = b"n" * 16


class Process:
    """A worker process: a core over its own model binding and pool. A restart is a new Process."""

    def __init__(self, name: str, incarnation: int, core: DecodeCore | PrefillCore, region: np.ndarray) -> None:
        self.name = name
        self.core = core
        self.region = region
        self.alive = True
        self.card = Card(incarnation=f"{name}-{incarnation}", region_bytes=len(region), ways=())
        self.pulls: dict[int, Pull] = {}
        self.expired: set[int] = set()
        self.fetches: dict[int, FetchStored] = {}
        self.offers: deque[OfferPages] = deque()

    @property
    def engine(self) -> EngineCore:
        return self.core.engine

    def page(self, index: int) -> np.ndarray:
        return self.engine.cache.pages[index]


@dataclass(eq=False)
class Stream:
    """One `Prefill` stream: ordered both ways, until it breaks."""

    handover_id: int
    name: str
    decode: Process
    prefill: Process
    to_prefill: deque[object] = field(default_factory=deque)
    to_decode: deque[object] = field(default_factory=deque)
    broken: bool = False
    broken_at_s: float | None = None
    prefill_over: bool = False
    """The prefill worker knows that the stream is over."""
    last_word: bool = False
    """The decode worker has heard the last word."""


@dataclass
class Outcome:
    """What the gateway has heard of one attempt."""

    start: StartAttempt
    accepted: bool = False
    tokens: list[int] = field(default_factory=list)
    last: object = None


class World:
    """Each method named like a happening makes it happen; `settle_everything` lets all that is under way come to its
    end."""

    def __init__(self, models: dict[str, Model], *, local_prefill_max_tokens: int = 0) -> None:
        """models: one per worker's name, all with the same weights; each is bound to its worker's pool."""
        self.models = models
        self.now_s = 0.0
        self.local_prefill_max_tokens = local_prefill_max_tokens
        self.incarnations = 0
        self.decode = self.new_decode()
        self.prefill = [self.new_prefill("prefill-0"), self.new_prefill("prefill-1")]
        self.dead: list[Process] = []
        self.streams: list[Stream] = []
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.num_requests = 0
        self.stored: dict[bytes, np.ndarray] = {}
        """Pages on storage nodes, by key."""

    # Processes.

    def new_engine(self, name: str) -> tuple[EngineCore, WriteBack, np.ndarray]:
        model = self.models[name]
        layout = model.layout(PAGE_SIZE)
        region = allocate_region(NUM_PAGES * layout.page_bytes)
        cache = PageCache(layout, region, NUM_PAGES)
        model.bind(cache.pages, layout)
        engine = EngineCore(model, cache, EngineConfig(chunk_tokens=6, max_running=4, growth_reserve_tokens=4))
        return engine, WriteBack(cache, WriteBackConfig(free_share=0.4, max_inflight_pages=4, offer_pages=2)), region

    def new_decode(self) -> Process:
        engine, write_back, region = self.new_engine("decode")
        config = DecodeCoreConfig(
            local_prefill_max_tokens=self.local_prefill_max_tokens, pull_deadline_s=DEADLINE_S, grace_s=GRACE_S
        )
        self.incarnations += 1
        return Process("decode", self.incarnations, DecodeCore(engine, write_back, config, NAMESPACE), region)

    def new_prefill(self, name: str) -> Process:
        engine, write_back, region = self.new_engine(name)
        config = PrefillCoreConfig(pull_deadline_s=DEADLINE_S, grace_s=GRACE_S)
        self.incarnations += 1
        return Process(name, self.incarnations, PrefillCore(engine, write_back, config, NAMESPACE), region)

    @property
    def processes(self) -> list[Process]:
        return [self.decode, *self.prefill]

    # Happenings.

    def start(self, token_ids: list[int], max_tokens: int, num_peers: int, request: int | None = None) -> None:
        """The gateway places a request, or places it again as the next attempt."""
        if request is None or not self.num_requests:
            self.num_requests += 1
            request_id, attempt = f"request-{self.num_requests}", 1
        else:
            request_id = f"request-{1 + request % self.num_requests}"
            earlier = [outcome for (name, _), outcome in self.outcomes.items() if name == request_id]
            token_ids, attempt = list(earlier[0].start.token_ids), len(earlier) + 1
            max_tokens = earlier[0].start.params.max_tokens
        start = StartAttempt(
            session="gateway",
            request_id=request_id,
            attempt=attempt,
            token_ids=tuple(token_ids),
            num_prompt_tokens=len(token_ids),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            tenant_salt=b"",
            peers=tuple(PrefillPeer(p.name, p.card.incarnation, p.name) for p in self.prefill[:num_peers]),
        )
        self.outcomes[request_id, attempt] = Outcome(start)
        self.handle(self.decode, start)

    def cancel(self, request: int) -> None:
        running = [outcome for outcome in self.outcomes.values() if outcome.accepted and outcome.last is None]
        if running:
            start = running[request % len(running)].start
            self.handle(self.decode, CancelAttempt("gateway", start.request_id, start.attempt))

    def step(self, process: Process) -> None:
        process.core.step(self.now_s)
        self.carry_out(process)

    def deliver_to_prefill(self, stream: Stream) -> None:
        if not stream.broken and stream.to_prefill:
            message = stream.to_prefill.popleft()
            stream.prefill_over = isinstance(message, HandoverReleased)
            self.handle(stream.prefill, message)

    def deliver_to_decode(self, stream: Stream) -> None:
        if not stream.broken and stream.to_decode:
            message = stream.to_decode.popleft()
            stream.last_word = isinstance(message, (PeerDone, PeerFailed))
            self.handle(stream.decode, message)

    def break_stream(self, stream: Stream) -> None:
        """What was under way is lost; both ends notice."""
        if stream.broken or (stream.last_word and stream.prefill_over):
            return
        stream.broken, stream.broken_at_s = True, self.now_s
        if stream.decode.alive and not stream.last_word:
            stream.last_word = True
            self.handle(stream.decode, PeerBroken(stream.handover_id, "broken"))
        if stream.prefill.alive and not stream.prefill_over:
            stream.prefill_over = True
            self.handle(stream.prefill, HandoverBroken(stream.name))

    def kill(self, process: Process) -> None:
        """The process dies and comes back empty; its streams break, pulls from it fail when they are looked at."""
        process.alive = False
        self.dead.append(process)
        if process is self.decode:
            self.decode = self.new_decode()
            for outcome in self.outcomes.values():
                if outcome.last is None:
                    outcome.last = "lost with the decode worker"
        else:
            self.prefill[self.prefill.index(process)] = self.new_prefill(process.name)
        for stream in self.streams:
            if process in (stream.decode, stream.prefill):
                self.break_stream(stream)

    def settle(self, process: Process, place: int, fault: str = "") -> None:
        """One of the process' pulls settles: fault is "", "error" or "damage"."""
        pull_id = sorted(process.pulls)[place % len(process.pulls)]
        pull = process.pulls.pop(pull_id)
        source = next((p for p in [*self.processes, *self.dead] if p.card.incarnation == pull.card.incarnation), None)
        assert source is not None
        if not source.alive or fault == "error":
            self.handle(process, PullSettled(pull_id, "peer gone", (), 0, 0.0, ""))
            return
        layout = process.engine.cache.layout
        mismatched = []
        for index in range(len(pull.num_bytes)):
            page = int(pull.local_offsets[index]) // layout.page_bytes
            owner = process.engine.cache.ledger.owner(page)
            assert owner in (Owner.FILLING, Owner.QUARANTINED), f"bytes land in a page that is {owner}"
            remote = int(pull.remote_offsets[index])
            process.page(page)[:] = source.region[remote : remote + layout.page_bytes]
            if fault == "damage":
                process.page(page)[0] ^= 1
            digests = page_digests(process.page(page)[None], layout.num_kv_heads)[0]
            assert pull.expected is not None
            if not np.array_equal(digests, pull.expected[index]):
                mismatched.append(index)
        late = pull_id in process.expired
        process.expired.discard(pull_id)
        if not fault and not self.source_may_have_moved_on(process, pull):
            assert not mismatched, "a page changed under a pull that its lease should have protected"
        self.handle(process, PullSettled(pull_id, "expired" if late else None, tuple(mismatched), 0, 0.0, "played"))

    def source_may_have_moved_on(self, reader: Process, pull: Pull) -> bool:
        """After a broken stream the source waits for `grace_s` and no longer."""
        return any(
            stream.broken_at_s is not None and self.now_s >= stream.broken_at_s + GRACE_S
            for stream in self.streams
            if reader in (stream.decode, stream.prefill)
            and pull.card.incarnation in (stream.decode.card.incarnation, stream.prefill.card.incarnation)
        )

    def settle_fetch(self, process: Process, choice: int = 0) -> None:
        """Some of what was looked up is there, and lands; `choice` 0 brings all that the storage nodes have."""
        fetch = process.fetches.pop(min(process.fetches))
        filled = set()
        for place, target in enumerate(fetch.targets):
            if target.key in self.stored and not choice >> place & 1:
                owner = process.engine.cache.ledger.owner(target.page)
                assert owner in (Owner.FILLING, Owner.QUARANTINED), f"bytes land in a page that is {owner}"
                process.page(target.page)[:] = self.stored[target.key]
                filled.add(target.page)
        self.handle(process, FetchSettled(fetch.fetch_id, frozenset(filled)))

    def settle_offer(self, process: Process) -> None:
        """The storage nodes take what they are offered."""
        offer = process.offers.popleft()
        for cold in offer.pages:
            self.stored[cold.key] = process.page(cold.page).copy()
        self.handle(process, OfferSettled(offer.offer_id))

    def set_storage(self, num_nodes: int) -> None:
        for process in self.processes:
            self.handle(process, StorageChanged(num_nodes))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for process in self.processes:
            for pull in list(process.pulls.values()):
                if self.now_s >= pull.deadline_s and pull.pull_id not in process.expired:
                    process.expired.add(pull.pull_id)
                    self.handle(process, PullExpired(pull.pull_id))
            for fetch in list(process.fetches.values()):
                if self.now_s >= fetch.deadline_s:
                    self.handle(process, FetchExpired(fetch.fetch_id))

    # The edges.

    def handle(self, process: Process, event: object) -> None:
        if process.alive:
            process.core.handle(event, self.now_s)
            self.carry_out(process)

    def carry_out(self, process: Process) -> None:
        for instruction in process.core.take_instructions():
            match instruction:
                case Pull():
                    process.pulls[instruction.pull_id] = instruction
                case StopPull():
                    pass  # Nothing can be called back; it settles when it settles.
                case OfferPages():
                    process.offers.append(instruction)
                case FetchStored():
                    process.fetches[instruction.fetch_id] = instruction
                case Reply():
                    for request_id, attempt, event in instruction.events:
                        self.heard(self.outcomes[request_id, attempt], event)
                case AskPrefill():
                    self.open_stream(process, instruction)
                case CancelPrefill():
                    self.stream_of(process, instruction.handover_id).to_prefill.append(
                        CancelHandover(self.stream_of(process, instruction.handover_id).name)
                    )
                case ReleasePrefill():
                    stream = self.stream_of(process, instruction.handover_id)
                    stream.to_prefill.append(HandoverReleased(stream.name))
                case Accept() | Announce() | Complete() | Fail():
                    self.say(process, instruction)
        process.engine.check()
        self.check_pulls()

    def check_pulls(self) -> None:
        """What a pull that has not settled reads is leased out by its source, and nothing else lands where it lands."""
        for process in self.processes:
            page_bytes = process.engine.cache.layout.page_bytes
            targets = [int(offset) // page_bytes for pull in process.pulls.values() for offset in pull.local_offsets]
            assert len(targets) == len(set(targets)), f"two pulls land in one page of {process.name}"
            for pull in process.pulls.values():
                source = next((p for p in self.processes if p.card.incarnation == pull.card.incarnation), None)
                if source is None or self.source_may_have_moved_on(process, pull):
                    continue
                for offset in pull.remote_offsets:
                    leases = source.engine.cache.ledger.pins(int(offset) // page_bytes, PinKind.LEASE_OUT)
                    assert leases, f"{process.name} reads a page that {source.name} has not leased out"

    def heard(self, outcome: Outcome, event: object) -> None:
        assert outcome.last is None, f"{event} after the terminal event {outcome.last}"
        match event:
            case Accepted():
                outcome.accepted = True
            case Tokens():
                outcome.tokens.extend(token.token_id for token in event.tokens)
            case Finished() | Cancelled() | Failed() | Rejected():
                outcome.last = event

    def open_stream(self, process: Process, ask: AskPrefill) -> None:
        peer = next((p for p in [*self.prefill, *self.dead] if p.card.incarnation == ask.peer.incarnation), None)
        assert peer is not None
        stream = Stream(ask.handover_id, f"{process.card.incarnation}/{ask.handover_id}", process, peer)
        self.streams.append(stream)
        layout = process.engine.cache.layout
        held = tuple(self.ref(process, entry.page, entry.page_index, entry.key, layout.page_size) for entry in ask.lent)
        stream.to_prefill.append(
            StartHandover(
                handover=stream.name,
                request_id=ask.request_id,
                attempt=ask.attempt,
                token_ids=ask.token_ids,
                num_prompt_tokens=ask.num_prompt_tokens,
                params=ask.params,
                tenant_salt=ask.tenant_salt,
                held=held,
                card=process.card,
                wanted=ask.wanted,
            )
        )
        if not peer.alive:
            stream.prefill_over = True
            self.break_stream(stream)

    def stream_of(self, process: Process, handover_id: int) -> Stream:
        return next(s for s in self.streams if s.decode is process and s.handover_id == handover_id)

    def say(self, process: Process, instruction: Accept | Announce | Complete | Fail) -> None:
        stream = next(s for s in self.streams if s.name == instruction.handover)
        handover_id = stream.handover_id
        message: object
        match instruction:
            case Accept():
                message = PeerAccepted(handover_id, process.card)
            case Announce():
                message = PeerPages(
                    handover_id,
                    tuple(
                        self.ref(process, entry.page, entry.page_index, entry.key, entry.valid_tokens)
                        for entry in instruction.pages
                    ),
                )
            case Complete():
                message = PeerDone(handover_id, instruction.first, instruction.num_pages, instruction.computed_tokens)
            case Fail():
                message = PeerFailed(handover_id, FailureCode(instruction.code), instruction.message)
        stream.to_decode.append(message)

    def ref(self, process: Process, page: int, page_index: int, key: bytes, valid_tokens: int) -> PageRef:
        layout = process.engine.cache.layout
        digests = page_digests(process.page(page)[None], layout.num_kv_heads)[0]
        return PageRef(
            page_index=page_index,
            key=key,
            offset_bytes=process.engine.cache.offset_bytes(page),
            num_bytes=layout.page_bytes,
            digests=tuple(int(value) for value in digests),
            valid_tokens=valid_tokens,
        )

    # The end.

    @property
    def is_idle(self) -> bool:
        return all(process.core.is_idle for process in self.processes)

    def settle_everything(self) -> None:
        """No new request comes; all that is under way ends. Then every page must be free again."""
        for _ in range(2000):
            if self.is_idle:
                break
            for stream in self.streams:
                self.deliver_to_prefill(stream)
                self.deliver_to_decode(stream)
            for process in self.processes:
                while process.pulls:
                    self.settle(process, 0)
                while process.fetches:
                    self.settle_fetch(process)
                while process.offers:
                    self.settle_offer(process)
                self.step(process)
            self.pass_time(0.5)
        for process in self.processes:
            assert process.core.is_idle, process.name
            ledger = process.engine.cache.ledger
            assert ledger.pages_free == NUM_PAGES, process.name
            assert ledger.count(Owner.QUARANTINED) == 0
        for outcome in self.outcomes.values():
            assert outcome.last is not None, f"no terminal event: {outcome}"

    def finished(self) -> list[Outcome]:
        return [
            outcome
            for outcome in self.outcomes.values()
            if isinstance(outcome.last, Finished) and outcome.last.reason is FinishReason.LENGTH
        ]
