"""The engine core over a real tiny model: batches, chunks, prefixes, holes, growth and preemption change no token."""

import random

import pytest

from engine.core import EngineConfig, NoRoom
from engine.local import LocalEngine
from engine.model import load_model
from engine.sampling import SamplingParams
from engine.sequence import FinishReason, Span, merged_spans
from engine.source import ModelSource
from kvstore.pages import Owner
from tests.models import tiny_model

PAGE = 4
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("tiny"))
    return load_model(ModelSource(name="tiny", weights="random:3", config=str(folder)))


def engine_of(model, *, num_pages: int = 64, **config: int) -> LocalEngine:
    return LocalEngine(model, page_size=PAGE, num_pages=num_pages, config=EngineConfig(**config))


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]


def open_one(engine: LocalEngine, tokens: list[int], *, growth: int = 6, params: SamplingParams = GREEDY):
    return engine.core.open("one", tokens, len(tokens), params, namespace=b"n" * 16, growth_tokens=growth)


def run(engine: LocalEngine, sequence) -> list[int]:
    while sequence.pending:
        for output in engine.core.step().outputs:
            if output.finish is not None:
                engine.core.close(output.sequence)
        engine.core.check()
    return sequence.token_ids[sequence.num_prompt_tokens :]


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5])
def test_chunks_and_neighbours_change_no_token(model, length):
    tokens = prompt(length)
    expected = engine_of(model, chunk_tokens=1000).generate([tokens], GREEDY)
    others = [prompt(n, seed=n) for n in (2, 9, 17)]
    for chunk_tokens in (1, 3, PAGE, 7):
        assert engine_of(model, chunk_tokens=chunk_tokens).generate([tokens], GREEDY) == expected
        assert (
            engine_of(model, chunk_tokens=chunk_tokens).generate([others[0], tokens, *others[1:]], GREEDY)[1:2]
            == expected
        )


def test_a_cached_prefix_is_not_computed_again_and_changes_no_token(model):
    engine = engine_of(model)
    tokens = prompt(3 * PAGE + 1)
    expected = engine.generate([tokens], GREEDY)
    sequence = engine.core.open("again", tokens, len(tokens), GREEDY, namespace=engine._namespace, growth_tokens=6)
    assert sequence.cached_tokens == 3 * PAGE
    engine.core.compute(sequence)
    assert sequence.pending == [Span(3 * PAGE, 3 * PAGE + 1)]
    assert run(engine, sequence) == expected[0]


def test_only_the_holes_are_computed(model):
    """Pages behind a hole stay valid, since their keys commit to the whole prefix."""
    tokens = prompt(4 * PAGE + 2)
    engine = engine_of(model)
    first = open_one(engine, tokens)
    engine.core.compute(first)
    expected = run(engine, first)
    cache = engine.core.cache
    hole = first.keys[1]
    cache._drop(hole)
    second = open_one(engine, tokens)
    engine.core.compute(second)
    assert second.pending == [Span(PAGE, 2 * PAGE), Span(4 * PAGE, 4 * PAGE + 2)]
    assert run(engine, second) == expected


def test_output_pages_enter_the_tree_too(model):
    engine = engine_of(model)
    tokens = prompt(PAGE + 2)
    sequence = open_one(engine, tokens)
    engine.core.compute(sequence)
    answer = run(engine, sequence)
    following = open_one(engine, [*tokens, *answer, 5])
    assert following.cached_tokens == (len(tokens) + len(answer) - 1) // PAGE * PAGE
    engine.core.close(following)
    engine.core.check()


def test_no_room_begins_nothing(model):
    engine = engine_of(model, num_pages=4)
    with pytest.raises(NoRoom) as error:
        open_one(engine, prompt(3 * PAGE), growth=2 * PAGE)
    assert (error.value.needed_pages, error.value.room_pages) == (5, 4)
    assert engine.core.room_pages == 4
    engine.core.check()


def test_promised_growth_is_not_given_to_others(model):
    engine = engine_of(model, num_pages=4)
    first = open_one(engine, prompt(PAGE), growth=2 * PAGE)
    assert engine.core.room_pages == 1
    with pytest.raises(NoRoom):
        open_one(engine, prompt(PAGE, seed=1), growth=PAGE)
    engine.core.close(first)
    assert engine.core.room_pages == 4


def test_the_youngest_makes_room_when_growth_runs_out(model):
    """Growth beyond what was promised happens only where the client named no limit."""
    engine = engine_of(model, num_pages=5)
    endless = SamplingParams(max_tokens=0, ignore_eos=True)
    old = open_one(engine, prompt(PAGE), growth=1, params=endless)
    young = open_one(engine, prompt(PAGE, seed=1), growth=1, params=endless)
    for sequence in (old, young):
        engine.core.compute(sequence)
    preempted = []
    while not preempted:
        preempted = [output.sequence for output in engine.core.step().outputs if output.preempted]
        engine.core.check()
    assert preempted == [young]
    assert young.closed
    assert engine.core.preemptions == 1
    engine.core.step()
    engine.core.close(old)
    assert engine.core.cache.pages_free == 5


def test_a_text_ends_at_its_limit_at_a_stop_token_and_at_the_end_of_the_context(model):
    engine = engine_of(model, num_pages=64)
    (answer,) = engine.generate([prompt(5)], GREEDY)
    assert len(answer) == 6
    stop = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=(answer[2],))
    assert engine.generate([prompt(5)], stop) == [answer[: answer.index(answer[2])]]
    engine.core.context_tokens = 8
    sequence = open_one(engine, prompt(5), params=SamplingParams(max_tokens=0, ignore_eos=True))
    engine.core.compute(sequence)
    finishes = []
    while sequence.pending:
        finishes += [output.finish for output in engine.core.step().outputs]
    assert len(sequence.token_ids) == 8
    assert finishes[-1] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [([], "do not fit"), ([1] * 5000, "do not fit"), ([512], "token ids"), ([-1], "token ids")],
)
def test_nonsense_is_refused_before_it_reaches_a_step(model, tokens, problem):
    engine = engine_of(model)
    with pytest.raises(ValueError, match=problem):
        open_one(engine, tokens)
    assert engine.core.cache.pages_free == 64


def test_an_abandoned_page_is_quarantined_until_its_pull_settles(model):
    engine = engine_of(model, num_pages=4)
    sequence = open_one(engine, prompt(2 * PAGE), growth=1)
    page = engine.core.expect(sequence, 0)
    assert engine.core.abandon(sequence, 0)
    assert engine.core.cache.ledger.owner(page) is Owner.QUARANTINED
    assert not engine.core.landed(sequence, 0, page, counts=True)
    assert engine.core.cache.ledger.owner(page) is Owner.FREE
    assert 0 in sequence.missing
    engine.core.close(sequence)
    engine.core.check()


def test_a_sealed_tail_holds_nothing_behind_its_tokens(model):
    engine = engine_of(model)
    engine.core.cache.pages[:] = 0xFF
    sequence = open_one(engine, prompt(PAGE + 1))
    engine.core.compute(sequence)
    engine.core.step()
    assert engine.core.seal_tail(sequence, PAGE + 1) == 1
    layout = engine.core.cache.layout
    page = engine.core.cache.pages[sequence.block_table[1]].reshape(*layout.shape[:3], PAGE, -1)
    assert not page[..., 1:, :].any()
    assert (page[..., 0, :] != 0xFF).any()
    engine.core.close(sequence)


def test_spans_of_pages_merge_and_end_with_the_tokens():
    assert merged_spans({0, 1, 3, 4}, 4, 18) == [Span(0, 8), Span(12, 18)]
