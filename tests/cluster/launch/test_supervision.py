"""What the launcher concludes from its nodes' answers."""

from __future__ import annotations

from cluster.launch.supervision import NodeWatch, Verdict


def watch() -> NodeWatch:
    return NodeWatch("decode-0", 100, hang_s=10.0, asked_s=0.0)


def test_a_node_that_answers_is_no_news() -> None:
    node = watch()
    assert [node.answered(100, now_s) for now_s in (1.0, 2.0)] == [None, None]


def test_a_death_and_a_return_are_told_once_each() -> None:
    node = watch()
    assert node.gone(1.0) is Verdict.DIED
    assert node.gone(2.0) is None
    assert node.answered(200, 3.0) is Verdict.BACK
    assert node.pid == 200
    assert node.answered(200, 4.0) is None


def test_a_restart_between_two_questions_is_noticed_by_the_process_id() -> None:
    assert watch().answered(200, 1.0) is Verdict.BACK


def test_silence_becomes_a_hang_after_its_time_and_then_counts_as_a_death() -> None:
    node = watch()
    assert node.answered(100, 5.0) is None
    assert node.silent(14.9) is None
    assert node.silent(15.0) is Verdict.HUNG
    assert node.silent(40.0) is None
    assert node.gone(41.0) is None
    assert node.answered(300, 42.0) is Verdict.BACK


def test_an_answer_in_time_begins_the_silence_anew() -> None:
    node = watch()
    assert node.silent(9.0) is None
    assert node.answered(100, 9.5) is None
    assert node.silent(19.0) is None
    assert node.silent(19.5) is Verdict.HUNG
