"""What is computed from the instants of requests."""

from __future__ import annotations

import pytest

from benchmarks.turn import RequestTiming, Turn, batch_timings


def request(sent_s: float, first_token_s: float, ended_s: float, output_tokens: int) -> RequestTiming:
    return RequestTiming(sent_s=sent_s, first_token_s=first_token_s, ended_s=ended_s, output_tokens=output_tokens)


def test_ttft_counts_from_the_send_and_tpot_from_the_first_token():
    timing = request(10.0, 10.5, 12.5, 5)
    assert timing.ttft_s == 0.5
    assert timing.tpot_s == 0.5


def test_a_single_token_has_no_time_per_output_token():
    assert request(0.0, 1.0, 1.0, 1).tpot_s is None


def test_throughput_counts_all_streams_from_the_first_send_to_the_last_end():
    turn = Turn(requests=(request(0.0, 1.0, 3.0, 10), request(1.0, 2.0, 5.0, 10)))
    assert turn.seconds == 5.0
    assert turn.output_tokens_per_s == 4.0


def test_a_batch_is_sent_at_once():
    first, second = batch_timings(1.0, [[2.0, 3.0, 4.0], [2.5, 3.0, 4.0]])
    assert (first.sent_s, first.first_token_s, first.ended_s, first.output_tokens) == (1.0, 2.0, 4.0, 3)
    assert second.ttft_s == pytest.approx(1.5)
