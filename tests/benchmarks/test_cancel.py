"""When a worker counts as having its pages back."""

from __future__ import annotations

from benchmarks.cancel import CONFIRMATIONS, FreedWatch
from benchmarks.load_reports import Report


def report(node_id: str, received_s: float, *, free: int = 100, running: int = 0, waiting: int = 0) -> Report:
    return Report(
        node_id=node_id, received_s=received_s, pages_total=100, pages_free=free, running=running, waiting=waiting
    )


def watch(*reports: Report, nodes: tuple[str, ...] = ("decode-0",)) -> FreedWatch:
    watch = FreedWatch(nodes)
    for each in reports:
        watch.take(each)
    return watch


def at_rest(node_id: str, first_s: float) -> list[Report]:
    return [report(node_id, first_s + count) for count in range(CONFIRMATIONS)]


def test_the_time_is_that_of_the_first_report_of_those_that_confirm_it():
    assert watch(report("decode-0", 1.0, free=90, running=1), *at_rest("decode-0", 2.0)).freed_s == 2.0


def test_too_few_reports_confirm_nothing():
    assert watch(*at_rest("decode-0", 2.0)[:-1]).freed_s is None


def test_a_request_that_arrives_late_begins_the_wait_again():
    """It was on its way to the worker when its client left."""
    early = report("decode-0", 1.0)
    assert watch(early, report("decode-0", 1.5, free=92, running=1), *at_rest("decode-0", 2.0)).freed_s == 2.0


def test_the_slowest_worker_decides():
    both = watch(*at_rest("prefill-0", 1.0), *at_rest("decode-0", 4.0), nodes=("prefill-0", "decode-0"))
    assert both.freed_s == 4.0


def test_a_worker_that_says_nothing_is_waited_for():
    waiting = watch(*at_rest("decode-0", 1.0), nodes=("prefill-0", "decode-0"))
    assert waiting.freed_s is None
    assert waiting.missing() == "prefill-0 says nothing"


def test_pages_that_are_neither_used_nor_free_keep_a_worker_from_rest():
    """Quarantined ones, say."""
    stuck = watch(*(report("decode-0", float(count), free=99) for count in range(10)))
    assert stuck.freed_s is None
    assert "pages_free=99" in stuck.missing()


def test_a_waiting_request_keeps_a_worker_from_rest():
    assert watch(*(report("decode-0", float(count), waiting=1) for count in range(10))).freed_s is None
