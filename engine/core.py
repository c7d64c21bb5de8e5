"""Sequences over one page pool: admission, steps, growth, preemption. No network, no clock, no thread of its own."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass

from engine.model import Model, Segment
from engine.sampling import Sampled, SamplingParams, SamplingRow, sample
from engine.schedule import Work, plan_step
from engine.sequence import FinishReason, Sequence, Span, merged_spans
from kvstore.pages import OutOfPages, Owner, PageCache, PinKind, extend_key, page_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How one worker batches."""

    chunk_tokens: int = 256
    """Prompt positions computed per step at most, all requests together."""
    max_running: int = 64
    """Requests admitted at once."""
    growth_reserve_tokens: int = 256
    """Room kept for output where the client named no limit."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_running", "growth_reserve_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


class NoRoom(Exception):
    """Not admitted; nothing was begun. Attributes: `needed_pages`, `room_pages`."""

    def __init__(self, needed_pages: int, room_pages: int) -> None:
        super().__init__(f"{needed_pages} pages needed, room for {room_pages}")
        self.needed_pages = needed_pages
        self.room_pages = room_pages


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave to one sequence."""

    sequence: Sequence
    token: Sampled | None = None
    """The sampled token where the last position was computed."""
    finish: FinishReason | None = None
    """Why the text ends here, if it does. A token that says STOP is not part of the output."""
    final_pages: tuple[int, ...] = ()
    """Page indices that became full, thus immutable."""
    preempted: bool = False
    """It lost its pages to older sequences and must be placed again."""
    error: str | None = None
    """This sequence alone cannot go on."""


@dataclass(frozen=True, slots=True)
class StepReport:
    outputs: tuple[StepOutput, ...]
    prompt_tokens: int
    """Prompt positions computed."""
    decode_tokens: int
    """Rows of sequences that were decoding."""


class EngineCore:
    """Owned by the step loop.

    A sequence's page is RESERVED at admission, FILLING while it is computed or pulled, and enters the prefix tree as
    soon as its last position is final. Admission keeps `reserved + promised growth <= capacity`, so a sequence that
    named its `max_tokens` is never preempted for its own growth.
    """

    def __init__(self, model: Model, cache: PageCache, config: EngineConfig) -> None:
        self.model = model
        self.cache = cache
        self.config = config
        self.page_size = cache.layout.page_size
        self.context_tokens = model.config.context_tokens
        self.sequences: dict[int, Sequence] = {}
        self.preemptions = 0
        self._arrivals = 0
        self._promised_pages = 0

    @property
    def room_pages(self) -> int:
        """Pages that a new sequence could have."""
        return max(self.cache.pages_free - self._promised_pages, 0)

    @property
    def has_work(self) -> bool:
        return any(sequence.pending for sequence in self.sequences.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt positions that are still to be computed."""
        return sum(s.num_pending for s in self.sequences.values() if not s.is_decoding)

    def open(
        self,
        request_id: str,
        token_ids: ReadOnlyList[int],
        num_prompt_tokens: int,
        params: SamplingParams,
        *,
        namespace: bytes,
        growth_tokens: int,
    ) -> Sequence:
        """Admit: pin what the tree has, reserve the rest of the prompt, promise `growth_tokens` of output.

        Nothing is computed until `compute` or `start_decoding`. Raises NoRoom, and ValueError for a request that can
        never be served.
        """
        num_tokens = len(token_ids)
        self._refuse_nonsense(token_ids, num_prompt_tokens, params)
        # The last token is always computed: its logits are what the request is about.
        keys = page_keys(namespace, token_ids, self.page_size)[: (num_tokens - 1) // self.page_size]
        total = self.cache.layout.pages_for(num_tokens)
        growth = self.cache.layout.pages_for(min(num_tokens + growth_tokens, self.context_tokens)) - total
        found = self.cache.take(keys)
        block_table = [*found, *[None] * (total - len(found))]
        missing = [index for index, page in enumerate(block_table) if page is None]
        needed = len(missing) + growth
        if needed > self.room_pages or len(self.sequences) >= self.config.max_running:
            room = self.room_pages
            for page in found:
                if page is not None:
                    self.cache.release(page)
            raise NoRoom(needed, room)
        for index, page in zip(missing, self.cache.reserve(len(missing)), strict=True):
            block_table[index] = page
        self._arrivals += 1
        self._promised_pages += growth
        sequence = Sequence(
            request_id=request_id,
            token_ids=list(token_ids),
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            namespace=namespace,
            arrival=self._arrivals,
            block_table=[page for page in block_table if page is not None],
            keys=keys,
            missing=set(missing),
            growth_pages=growth,
            cached_tokens=(total - len(missing)) * self.page_size,
        )
        self.sequences[sequence.arrival] = sequence
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Let go of every page. Pages that a pull may still write to are quarantined by the ledger. Idempotent."""
        if sequence.closed:
            return
        sequence.closed = True
        sequence.pending.clear()
        del self.sequences[sequence.arrival]
        self._promised_pages -= sequence.growth_pages
        # Deepest first, so that what is published of this request is evicted from its end.
        for page in reversed(sequence.block_table):
            self.cache.release(page)

    # Pages that come from elsewhere.

    def expect(self, sequence: Sequence, index: int) -> int:
        """A pull into the sequence's page `index` begins. Returns the page id, pinned LANDING until `landed`."""
        page = sequence.block_table[index]
        if self.cache.ledger.owner(page) is Owner.RESERVED:
            self.cache.ledger.begin_fill(page)
        self.cache.ledger.pin(page, PinKind.LANDING)
        return page

    def landed(self, sequence: Sequence, index: int, page: int, *, counts: bool) -> bool:
        """A pull into `page` has settled; `counts` says whether its bytes are the right ones, in time.

        Returns whether the sequence has the page now. False where the sequence closed, or replaced the page, in the
        meantime.
        """
        self.cache.ledger.unpin(page, PinKind.LANDING)
        if sequence.closed or sequence.block_table[index] != page or not counts or index not in sequence.missing:
            return False
        sequence.missing.remove(index)
        if (index + 1) * self.page_size <= len(sequence.token_ids):
            self._finalise(sequence, index)
        return True

    def abandon(self, sequence: Sequence, index: int) -> bool:
        """Give the sequence another page for `index`, since a pull into this one may never settle.

        Returns False where there is no other page; the sequence cannot go on then.
        """
        try:
            (fresh,) = self.cache.reserve(1)
        except OutOfPages:
            return False
        self.cache.release(sequence.block_table[index])
        sequence.block_table[index] = fresh
        return True

    # Computing.

    def compute(self, sequence: Sequence) -> None:
        """Compute what is missing; the first token follows when the last position is done."""
        sequence.pending = merged_spans(sequence.missing, self.page_size, len(sequence.token_ids))

    def start_decoding(self, sequence: Sequence, first: Sampled) -> FinishReason | None:
        """Take the first token from a prefill worker:

        every page of the prompt is here. Returns why it ends already, if so.
        """
        assert not sequence.missing, sequence.missing
        return self._append(sequence, first)

    def step(self) -> StepReport:
        """Run the model once over all that is pending, within the chunk budget."""
        outputs: list[StepOutput] = []
        work = self._grown(plan_step(self.sequences.values(), self.config.chunk_tokens), outputs)
        if not work:
            return StepReport(tuple(outputs), 0, 0)
        segments = [
            Segment(
                sequence.token_ids[start:stop],
                start,
                sequence.block_table,
                wants_logits=stop == len(sequence.token_ids),
            )
            for sequence, start, stop in work
        ]
        decode_tokens = sum(sequence.is_decoding for sequence, _, _ in work)
        logits = self.model.forward(segments)
        sampling = [item.sequence for item, segment in zip(work, segments, strict=True) if segment.wants_logits]
        rows = [SamplingRow(s.params, s.token_ids, s.num_prompt_tokens) for s in sampling]
        tokens = {s.arrival: token for s, token in zip(sampling, sample(logits, rows), strict=True)}
        outputs.extend(self._advance(item, tokens.get(item.sequence.arrival)) for item in work)
        num_computed = sum(stop - start for _, start, stop in work)
        return StepReport(tuple(outputs), num_computed - decode_tokens, decode_tokens)

    def seal_tail(self, sequence: Sequence, num_tokens: int) -> int:
        """Zero the positions after `num_tokens` in their page (no left-overs, no NaN).

        Returns the positions that it holds.
        """
        index = (num_tokens - 1) // self.page_size
        valid = num_tokens - index * self.page_size
        layout = self.cache.layout
        page = self.cache.pages[sequence.block_table[index]]
        page.reshape(*layout.shape[:3], layout.page_size, -1)[..., valid:, :] = 0
        return valid

    def check(self) -> None:
        """Assert that pages are conserved: every owned page is in exactly the block tables that say so."""
        self.cache.check()
        ledger = self.cache.ledger
        own: set[int] = set()
        requests: dict[int, int] = {}
        for sequence in self.sequences.values():
            for page in sequence.block_table:
                if ledger.owner(page) is Owner.TREE:
                    requests[page] = requests.get(page, 0) + 1
                else:
                    assert ledger.owner(page) in (Owner.RESERVED, Owner.FILLING, Owner.REQUEST), ledger.owner(page)
                    assert page not in own
                    own.add(page)
        for page in range(ledger.num_pages):
            assert ledger.pins(page, PinKind.REQUEST) == requests.get(page, 0), page
        owned = sum(ledger.count(owner) for owner in (Owner.RESERVED, Owner.FILLING, Owner.REQUEST))
        assert owned == len(own), (owned, len(own))
        assert self._promised_pages == sum(s.growth_pages for s in self.sequences.values())

    def _refuse_nonsense(self, token_ids: ReadOnlyList[int], num_prompt_tokens: int, params: SamplingParams) -> None:
        """What would fail inside a step, where it would take other requests with it."""
        num_tokens, vocab_size = len(token_ids), self.model.config.vocab_size
        if not 0 < num_prompt_tokens <= num_tokens < self.context_tokens:
            got = f"{num_tokens} tokens, {num_prompt_tokens} of them the prompt's"
            raise ValueError(f"{got}, do not fit a context of {self.context_tokens}")
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise ValueError(f"token ids must lie in [0, {vocab_size})")
        if any(token_id >= vocab_size for token_id in params.logit_bias):
            raise ValueError(f"logit_bias: token ids must lie in [0, {vocab_size})")
        num_pages = self.cache.layout.pages_for(num_tokens)
        if num_pages > self.cache.ledger.num_pages:
            raise ValueError(f"{num_pages} pages do not fit a pool of {self.cache.ledger.num_pages}")

    def _grown(self, work: Iterable[Work], outputs: list[StepOutput]) -> list[Work]:
        """Work whose positions all have a page. The youngest sequences make room where none is left."""
        grown: list[Work] = []
        for item in work:
            while not item.sequence.closed and not self._grow(item.sequence, item.stop):
                victim = max(self.sequences.values(), key=lambda sequence: sequence.arrival)
                self.close(victim)
                self.preemptions += 1
                outputs.append(StepOutput(victim, preempted=True))
            if not item.sequence.closed:
                grown.append(item)
        return [item for item in grown if not item.sequence.closed]

    def _grow(self, sequence: Sequence, stop: int) -> bool:
        missing = self.cache.layout.pages_for(stop) - len(sequence.block_table)
        if missing <= 0:
            return True
        try:
            sequence.block_table.extend(self.cache.reserve(missing))
        except OutOfPages:
            return False
        kept = min(missing, sequence.growth_pages)
        sequence.growth_pages -= kept
        self._promised_pages -= kept
        return True

    def _advance(self, item: Work, token: Sampled | None) -> StepOutput:
        sequence, start, stop = item
        sequence.computed_tokens += stop - start
        span = sequence.pending[0]
        if stop == span.stop:
            del sequence.pending[0]
        else:
            sequence.pending[0] = Span(stop, span.stop)
        final: list[int] = []
        for index in range(start // self.page_size, self.cache.layout.pages_for(stop)):
            page = sequence.block_table[index]
            if self.cache.ledger.owner(page) is Owner.RESERVED:
                self.cache.ledger.begin_fill(page)
            if (index + 1) * self.page_size <= stop:
                sequence.missing.discard(index)
                self._finalise(sequence, index)
                final.append(index)
        if token is None:
            return StepOutput(sequence, final_pages=tuple(final))
        sequence.missing.discard(len(sequence.block_table) - 1)
        assert not sequence.missing, sequence.missing
        if token.error is not None:
            return StepOutput(sequence, final_pages=tuple(final), error=token.error)
        finish = self._append(sequence, token)
        return StepOutput(sequence, token=token, finish=finish, final_pages=tuple(final))

    def _append(self, sequence: Sequence, token: Sampled) -> FinishReason | None:
        params = sequence.params
        if token.token_id in params.stop_token_ids:
            return FinishReason.STOP
        if token.token_id in self.model.config.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        sequence.token_ids.append(token.token_id)
        length = len(sequence.token_ids)
        if sequence.num_output_tokens == params.max_tokens or length >= self.context_tokens:
            return FinishReason.LENGTH
        sequence.pending = [Span(length - 1, length)]
        return None

    def _finalise(self, sequence: Sequence, index: int) -> None:
        """All positions of the page hold their final values."""
        keys = sequence.keys
        while len(keys) <= index:
            start = len(keys) * self.page_size
            parent = keys[-1] if keys else sequence.namespace
            keys.append(extend_key(parent, sequence.token_ids[start : start + self.page_size]))
        page = sequence.block_table[index]
        self.cache.ledger.complete(page)
        self.cache.publish(page, keys, index)
