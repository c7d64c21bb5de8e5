"""The ledger and the hand-over under random schedules of cancels, deaths, late and lost messages."""

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode_node.messages import Cancelled, Failed, FailureCode, Finished, PeerAccepted, PeerFailed, Rejected
from engine import ModelSource, SamplingParams, load_model
from engine.core import EngineConfig
from engine.local import LocalEngine
from kvstore.pages import EvictPrefixes
from kvstore.transport import Card
from tests.handover.world import PAGE_SIZE, World
from tests.models import tiny_model

HAPPENINGS = (
    ["step"] * 6
    + ["deliver"] * 8
    + ["settle"] * 4
    + ["start"] * 2
    + ["cancel", "break", "kill", "error", "damage", "wait", "long wait", "offer", "offer", "storage", "again", "evict"]
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    source = ModelSource(name="tiny", weights="random:7", config=str(tiny_model(tmp_path_factory.mktemp("tiny"))))
    return {name: load_model(source) for name in ("decode", "prefill-0", "prefill-1", "alone")}


@pytest.fixture(scope="module")
def alone(models):
    """Output of one process running the same engine, by prompt and length."""
    engine = LocalEngine(models["alone"], page_size=PAGE_SIZE, num_pages=64, config=EngineConfig(chunk_tokens=64))

    @functools.cache
    def generate(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        return engine.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0]

    return generate


def prompt(choice: int) -> list[int]:
    """Prompts that share prefixes, around page edges."""
    length = (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 3 * PAGE_SIZE + 1, 5 * PAGE_SIZE)[choice % 6]
    return [3 + (choice // 6) % 2, *range(10, 9 + length)]


def happen(world: World, tape: list[int]) -> None:
    """One happening per number of the tape; one that is not possible now does nothing."""
    for number in tape:
        kind, choice = HAPPENINGS[number % len(HAPPENINGS)], number // len(HAPPENINGS)
        processes, streams = world.processes, [s for s in world.streams if not s.broken]
        match kind:
            case "step":
                world.step(processes[choice % 3])
            case "deliver" if streams:
                stream = streams[choice // 2 % len(streams)]
                (world.deliver_to_prefill if choice % 2 and stream.to_prefill else world.deliver_to_decode)(stream)
            case "settle" | "error" | "damage":
                for process in processes:
                    if process.pulls:
                        world.settle(process, choice, "" if kind == "settle" else kind)
                    elif process.fetches:
                        world.settle_fetch(process, choice)
            case "start":
                world.start(prompt(choice), max_tokens=1 + choice % 5, num_peers=choice % 3)
            case "again" if world.num_requests:
                world.start([], 0, num_peers=choice % 3, request=choice)
            case "cancel":
                world.cancel(choice)
            case "break" if streams:
                world.break_stream(streams[choice % len(streams)])
            case "kill" if choice % 4 == 0:
                world.kill(processes[choice // 4 % 3])
            case "wait" | "long wait":
                world.pass_time(1.0 if kind == "wait" else 6.0)
            case "offer":
                for process in processes:
                    if process.offers:
                        world.settle_offer(process)
            case "storage":
                world.set_storage(min(choice % 4, 1))
            case "evict":
                world.handle(processes[choice % 3], EvictPrefixes())


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(tape=st.lists(st.integers(0, 4000), min_size=10, max_size=90), local=st.sampled_from([0, 6]))
def test_whatever_happens_pages_come_back_and_every_answer_is_that_of_one_process(models, alone, tape, local):
    world = World(models, local_prefill_max_tokens=local)
    happen(world, tape)
    world.settle_everything()
    for outcome in world.outcomes.values():
        expected = alone(outcome.start.token_ids, outcome.start.params.max_tokens)
        assert outcome.tokens == expected[: len(outcome.tokens)]
        if isinstance(outcome.last, Finished):
            assert outcome.tokens == expected
        else:
            last = outcome.last
            assert isinstance(last, (Cancelled, Rejected, str)) or (
                isinstance(last, Failed) and last.code is FailureCode.ABORTED
            ), last


def drive(world: World) -> None:
    world.settle_everything()


def test_a_prompt_goes_through_a_prefill_worker_and_its_prefix_stays_in_both_trees(models, alone):
    world = World(models)
    world.start(prompt(4), max_tokens=3, num_peers=1)
    drive(world)
    (outcome,) = world.finished()
    assert outcome.tokens == alone(tuple(prompt(4)), 3)
    assert outcome.last.cached_tokens == 0
    assert world.prefill[0].engine.cache.num_cached == 3
    assert world.decode.engine.cache.num_cached == 3


def test_the_next_turn_computes_only_what_is_new(models, alone):
    """Turn 2 = turn 1, its answer and more: the answer's pages exist only at the decode worker, and are lent."""
    world = World(models)
    first = prompt(5)
    world.start(first, max_tokens=PAGE_SIZE + 1, num_peers=1)
    drive(world)
    answer = alone(tuple(first), PAGE_SIZE + 1)
    second = [*first, *answer, 77, 78]
    world.start(second, max_tokens=3, num_peers=1)
    drive(world)
    outcome = world.finished()[1]
    assert outcome.tokens == alone(tuple(second), 3)
    assert outcome.last.cached_tokens == len(first) + PAGE_SIZE  # All but what follows the last full page.


def test_after_a_death_the_next_prefill_worker_is_asked_for_the_rest(models, alone):
    world = World(models)
    world.start(prompt(5), max_tokens=2, num_peers=2)
    stream = world.streams[0]
    world.deliver_to_prefill(stream)
    world.step(world.prefill[0])
    world.deliver_to_decode(stream)
    world.deliver_to_decode(stream)
    world.settle(world.decode, 0)
    world.kill(world.prefill[0])
    assert [span.start for span in world.streams[1].to_prefill[0].wanted] == [1]
    drive(world)
    (outcome,) = world.finished()
    assert outcome.tokens == alone(tuple(prompt(5)), 2)


def test_without_a_prefill_worker_left_the_attempt_is_aborted(models):
    world = World(models)
    world.start(prompt(5), max_tokens=2, num_peers=1)
    world.kill(world.prefill[0])
    (outcome,) = world.outcomes.values()
    assert outcome.last.code is FailureCode.ABORTED


def test_pages_lent_on_a_broken_stream_stay_for_the_grace_and_no_longer(models):
    world = World(models)
    world.start(prompt(4), max_tokens=2, num_peers=1)
    stream = world.streams[0]
    world.deliver_to_prefill(stream)
    for _ in range(4):
        world.step(world.prefill[0])
    world.break_stream(stream)
    world.step(world.prefill[0])
    assert world.prefill[0].core.stats().pages_quarantined == 4
    world.pass_time(10.0)
    world.step(world.prefill[0])
    assert world.prefill[0].core.stats().pages_quarantined == 0
    drive(world)


def test_a_damaged_page_never_counts(models, alone):
    world = World(models)
    world.start(prompt(4), max_tokens=2, num_peers=2)
    stream = world.streams[0]
    world.deliver_to_prefill(stream)
    world.step(world.prefill[0])
    world.deliver_to_decode(stream)
    world.deliver_to_decode(stream)
    world.settle(world.decode, 0, "damage")
    assert len(world.streams) == 2
    drive(world)
    (outcome,) = world.finished()
    assert outcome.tokens == alone(tuple(prompt(4)), 2)


def test_the_last_word_waits_for_reads_that_came_too_late(models, alone):
    """On hearing it the decode worker takes its lent pages back: an expired read may still be under way."""
    world = World(models)
    world.start(prompt(5), max_tokens=2, num_peers=1)
    drive(world)
    world.kill(world.prefill[0])
    world.start([*prompt(5), 90], max_tokens=2, num_peers=1)
    stream, prefill = world.streams[-1], world.prefill[0]
    world.deliver_to_prefill(stream)
    assert len(prefill.pulls) == 1
    world.pass_time(6.0)
    for _ in range(5):
        world.step(prefill)
    assert [type(message).__name__ for message in stream.to_decode].count("PeerDone") == 0
    world.settle(prefill, 0)
    assert type(stream.to_decode[-1]).__name__ == "PeerDone"
    drive(world)
    assert world.finished()[1].tokens == alone((*prompt(5), 90), 2)


def test_a_page_that_a_lost_worker_may_still_write_is_not_given_to_the_next(models, alone):
    world = World(models)
    world.start(prompt(5), max_tokens=2, num_peers=2)
    first = world.streams[0]
    world.deliver_to_prefill(first)
    world.step(world.prefill[0])
    world.deliver_to_decode(first)
    world.deliver_to_decode(first)
    assert len(world.decode.pulls) == 1
    world.break_stream(first)
    second = world.streams[1]
    world.deliver_to_prefill(second)
    world.step(world.prefill[1])
    world.deliver_to_decode(second)
    world.deliver_to_decode(second)
    assert len(world.decode.pulls) == 2
    world.settle(world.decode, 0)
    drive(world)
    assert world.finished()[0].tokens == alone(tuple(prompt(5)), 2)


def test_pages_that_went_to_storage_come_back_into_another_worker(models, alone):
    world = World(models)
    world.set_storage(1)
    world.start(prompt(5), max_tokens=2, num_peers=1)
    drive(world)
    for process in world.processes:
        world.handle(process, EvictPrefixes())
        world.step(process)
    drive(world)
    assert {process.engine.cache.num_cached for process in world.processes} == {0}
    world.kill(world.prefill[0])
    world.set_storage(1)
    world.start(prompt(5), max_tokens=2, num_peers=1)
    drive(world)
    assert world.finished()[1].tokens == alone(tuple(prompt(5)), 2)
    assert world.finished()[1].last.cached_tokens == 4 * PAGE_SIZE


def test_writing_out_takes_no_page_that_growth_was_promised(models, alone):
    """Regression: a flush while streams ran pinned every evictable page, and a request that had named its max_tokens
    was preempted for lack of the pages it had been promised."""
    world = World(models, local_prefill_max_tokens=64)
    world.set_storage(1)
    for choice in (4, 5, 10, 11):
        world.start(prompt(choice), max_tokens=1, num_peers=0)
        for _ in range(8):
            world.step(world.decode)
    world.start([9, 9], max_tokens=40, num_peers=0)
    world.handle(world.decode, EvictPrefixes())
    for _ in range(60):
        world.step(world.decode)
    assert world.decode.engine.preemptions == 0
    assert world.finished()[-1].tokens == alone((9, 9), 40)
    drive(world)


def test_a_silent_prefill_worker_is_given_up(models, alone):
    world = World(models)
    world.start(prompt(4), max_tokens=2, num_peers=2)
    world.pass_time(31.0)
    world.step(world.decode)
    assert [stream.prefill.name for stream in world.streams] == ["prefill-0", "prefill-1"]
    drive(world)
    assert world.finished()[0].tokens == alone(tuple(prompt(4)), 2)


def test_whoever_answers_at_the_address_of_a_dead_worker_is_not_believed(models, alone):
    world = World(models)
    world.start(prompt(0), max_tokens=2, num_peers=2)
    stranger = Card(incarnation="prefill-0-of-somebody-else", region_bytes=1, ways=())
    world.handle(world.decode, PeerAccepted(world.streams[0].handover_id, stranger))
    assert len(world.streams) == 2
    drive(world)
    assert world.finished()[0].tokens == alone(tuple(prompt(0)), 2)


@pytest.mark.parametrize("code", [FailureCode.INVALID, FailureCode.INTERNAL])
def test_what_would_fail_at_every_prefill_worker_is_not_tried_at_the_next(models, code):
    world = World(models)
    world.start(prompt(4), max_tokens=2, num_peers=2)
    world.handle(world.decode, PeerFailed(world.streams[0].handover_id, code, "the logits are not finite"))
    (outcome,) = world.outcomes.values()
    assert outcome.last.code is code
    assert len(world.streams) == 1


def test_pages_that_are_there_are_announced_before_the_others_have_come(models, alone):
    world = World(models)
    world.start(prompt(4), max_tokens=2, num_peers=1)
    drive(world)
    prefill = world.prefill[0]
    world.kill(world.decode)
    long = [*prompt(4), *range(100, 100 + PAGE_SIZE)]
    world.set_storage(1)
    world.start(long, max_tokens=2, num_peers=1)
    stream = world.streams[-1]
    world.deliver_to_prefill(stream)
    assert prefill.fetches
    announced = [ref.page_index for message in stream.to_decode for ref in getattr(message, "pages", ())]
    assert announced == [0, 1, 2]
    drive(world)
    assert world.finished()[-1].tokens == alone(tuple(long), 2)
