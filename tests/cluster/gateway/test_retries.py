"""How often one request is placed anew: plain arithmetic."""

from __future__ import annotations

import pytest

from cluster.gateway import PlacementConfig
from cluster.gateway.errors import Internal, InvalidRequest, Unavailable
from cluster.gateway.events import Failed, FailureCode, Lost, Rejected
from cluster.gateway.placement import Retries

ABORTED = Failed(FailureCode.ABORTED, "x")


def test_an_attempt_that_got_on_is_followed_by_the_next_at_once():
    retries = Retries(PlacementConfig(max_fruitless_attempts=2))
    assert [retries.after(ABORTED, progressed=True) for _ in range(100)] == [0.0] * 100


def test_fruitless_attempts_wait_longer_each_time_and_come_to_an_end():
    retries = Retries(PlacementConfig(max_fruitless_attempts=9))
    waits = [retries.after(ABORTED, progressed=False) for _ in range(8)]
    assert waits == sorted(waits)
    assert waits[0] > 0
    assert waits[-1] == waits[-2] == 1.0
    with pytest.raises(Unavailable):
        retries.after(ABORTED, progressed=False)


def test_progress_starts_the_count_of_fruitless_attempts_again():
    retries = Retries(PlacementConfig(max_fruitless_attempts=2))
    for _ in range(10):
        retries.after(ABORTED, progressed=False)
        retries.after(Rejected(1, 0), progressed=True)


@pytest.mark.parametrize("progressed", [False, True])
def test_a_request_may_lose_so_many_workers_whatever_it_got_from_them(progressed: bool):
    retries = Retries(PlacementConfig(max_lost_workers=3))
    for _ in range(3):
        retries.after(Lost("x"), progressed=progressed)
    with pytest.raises(Internal, match="4 workers"):
        retries.after(Lost("x"), progressed=progressed)


def test_what_is_invalid_is_not_tried_again():
    with pytest.raises(InvalidRequest, match="too odd"):
        Retries(PlacementConfig()).after(Failed(FailureCode.INVALID, "too odd"), progressed=False)


def test_internal_failures_are_tried_again_so_often():
    retries = Retries(PlacementConfig(max_internal_failures=1))
    retries.after(Failed(FailureCode.INTERNAL, "x"), progressed=True)
    with pytest.raises(Internal):
        retries.after(Failed(FailureCode.INTERNAL, "x"), progressed=True)
