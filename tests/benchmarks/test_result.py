"""From turns to the lines of the tables and the line of JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.cancel import CancelTimes
from benchmarks.config import ServeConfig
from benchmarks.machine import Machine, Moment
from benchmarks.report import Report
from benchmarks.result import HEADRACE, Findings, cancel_lines, engine_lines
from benchmarks.stats import Spread
from benchmarks.tables import engine_table, table
from benchmarks.turn import RequestTiming, Turn


def turn(ttft_s: float, seconds: float, *, streams: int = 1, cached_tokens: int = 0) -> Turn:
    """Each stream makes 10 tokens within `seconds`."""
    timing = RequestTiming(
        sent_s=0.0, first_token_s=ttft_s, ended_s=seconds, output_tokens=10, cached_tokens=cached_tokens
    )
    return Turn(requests=(timing,) * streams, driver_cores=0.1)


def findings() -> Findings:
    """Two repeats at 1 and 2 streams. The peer is twice as fast in the first repeat and as fast in the second."""
    return Findings(
        turns={
            HEADRACE: {1: [turn(0.2, 2.0), turn(0.1, 1.0)], 2: [turn(0.2, 2.0, streams=2)] * 2},
            "peer": {1: [turn(0.1, 1.0), turn(0.1, 1.0)], 2: [turn(0.4, 4.0, streams=2)] * 2},
        },
        engines={HEADRACE: "one worker", "peer": "peer 1.0; fixed batch"},
        absent={"vllm": "not installed"},
    )


CANCELS = CancelTimes(after_first_token_s=(0.01, 0.03), at_random_s=(), num_holding=2, num_over=1, report_every_s=0.05)


def report(found: Findings) -> Report:
    machine = Machine(
        cpu="a CPU",
        cores=2,
        memory_bytes=8 << 30,
        system="Linux 6",
        python="3.11",
        torch="2.13",
        headrace="0.1.0",
        commit="abc",
    )
    moment = Moment(load_average=0.1, read_bytes_per_s=20e9, read_bytes_per_s_of_one=10e9)
    return Report(
        config=ServeConfig(),
        machine=machine,
        weight_bytes=100_000_000,
        before=moment,
        after=dataclasses.replace(moment, load_average=0.2, read_bytes_per_s=15e9),
        findings=found,
    )


def test_lines_come_streams_first_with_headrace_on_top():
    lines = engine_lines(findings().turns, prompt_tokens=100)
    assert [(line.streams, line.engine) for line in lines] == [(1, HEADRACE), (1, "peer"), (2, HEADRACE), (2, "peer")]


def test_a_line_has_the_spread_of_repeats_and_the_percentiles_of_requests():
    line = engine_lines(findings().turns, prompt_tokens=100)[0]
    assert line.output_tokens_per_s == Spread(7.5, 5.0, 10.0)
    assert line.ttft_p50_s == pytest.approx(0.15)
    assert line.ttft_p99_s == pytest.approx(0.199)
    assert line.num_requests == 2


def test_ratios_are_headraces_figure_by_the_peers():
    ours, one, _, two = engine_lines(findings().turns, prompt_tokens=100)
    assert ours.tokens_per_s_to_headrace is ours.ttft_to_headrace is None
    assert one.tokens_per_s_to_headrace == Spread(0.75, 0.5, 1.0)
    assert one.ttft_to_headrace == Spread(1.5, 1.0, 2.0)
    assert two.tokens_per_s_to_headrace == Spread(2.0, 2.0, 2.0)
    assert two.ttft_to_headrace == Spread(0.5, 0.5, 0.5)


def test_the_share_of_cached_prompt_tokens_is_shown():
    (line,) = engine_lines({HEADRACE: {1: [turn(0.1, 1.0, cached_tokens=25)]}}, prompt_tokens=100)
    assert line.cached_share == 0.25


def test_kinds_of_close_without_trials_are_left_out():
    (line,) = cancel_lines(CANCELS)
    assert (line.close, line.num_trials) == ("after the first token", 2)
    assert line.p50_s == pytest.approx(0.02)


def test_the_report_says_who_took_no_part_and_what_was_not_measured():
    text = report(findings()).text(markdown=False)
    assert "vllm: took no part, not installed" in text
    assert "cancel to free: not measured" in text
    assert "one stream makes at most 200 tokens/s with all cores, 100 with one" in text


def test_the_json_is_one_line_with_the_config_and_the_numbers_of_every_repeat():
    found = findings()
    found.cancels = CANCELS
    line = report(found).json_line()
    assert "\n" not in line
    value = json.loads(line)
    assert value["config"]["streams"] == [1, 4, 16]
    assert value["output_tokens_per_s"]["headrace"]["1"] == [5.0, 10.0]
    assert value["cancel_times"]["after_first_token_s"] == [0.01, 0.03]


def test_markdown_is_a_table_that_a_readme_can_hold():
    text = engine_table(engine_lines(findings().turns, prompt_tokens=100), markdown=True)
    heads, rule, first, *_ = text.splitlines()
    assert heads.startswith("| streams | engine |")
    assert set(rule) == {"|", "-", " "}
    assert first.startswith("| 1 | headrace | 7.5 [5.0..10.0] |")


def test_columns_of_plain_text_are_aligned():
    assert table(("a", "b"), [("long", "x")], markdown=False) == "a     b\nlong  x"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"repeats": 0}, "repeats"),
        ({"streams": ()}, "streams"),
        ({"streams": (1, 1)}, "streams"),
        ({"streams": (0,)}, "streams"),
        ({"shared_prefix_tokens": 128}, "shared_prefix_tokens"),
        ({"peers": ("nobody",)}, "nobody"),
        ({"cancels": -1}, "cancels"),
        ({"cancel_heartbeat_s": 0.0}, "cancel_heartbeat_s"),
        ({"control": "127.0.0.1:1"}, "control"),
    ],
)
def test_a_config_that_makes_no_sense_names_its_field(changes, field):
    with pytest.raises(ValueError, match=field):
        ServeConfig(**changes)


def test_the_default_spec_exists():
    assert isinstance(ServeConfig().spec, Path)
    assert ServeConfig().spec.is_file()
