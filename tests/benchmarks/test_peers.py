"""Peers in processes of their own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.errors import BenchmarkError, Unavailable
from benchmarks.peers import PEERS, open_peer
from benchmarks.peers.child import Child
from benchmarks.peers.setup import PeerSetup
from benchmarks.prompts import Prompt
from engine.source import ModelSource
from tests.models import tiny_model

ECHO = """
from benchmarks.peers.child import run_child
from benchmarks.turn import batch_timings

class Worker:
    version = "one"

    def measure(self, rounds, output_tokens):
        print("noise of a library")
        if output_tokens == 13:
            raise SystemExit(7)
        return [timing for prompts in rounds for timing in batch_timings(0.0, [[1.0] * output_tokens] * len(prompts))]

run_child(Worker)
"""
REFUSING = """
from benchmarks.errors import Unavailable
from benchmarks.peers.child import run_child

def make():
    raise Unavailable("no such library")

run_child(make)
"""


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[PeerSetup]:
    with asyncio.Runner() as runner:
        yield PeerSetup(
            source=ModelSource(name="tiny", weights="random:3", config=str(tiny_model(tmp_path / "model"))),
            folder=tmp_path,
            cores=[0],
            runner=runner,
            llama_python=sys.executable,
            vllm_python=None,
        )


def child(script: str, setup: PeerSetup) -> Child:
    return Child("echo", [sys.executable, "-c", script], setup.environment, setup.folder / "log")


def test_a_child_answers_turn_after_turn_whatever_its_libraries_print(setup):
    peer = child(ECHO, setup)
    try:
        assert peer.ready() == "one"
        for num_rounds in (1, 2):
            timings = peer.measure([[[1, 2], [3, 4]]] * num_rounds, 3, deadline_s=60)
            assert [timing.output_tokens for timing in timings] == [3, 3] * num_rounds
        assert (setup.folder / "log").read_text().count("noise of a library") == 2
    finally:
        peer.close()
        peer.close()


def test_a_child_that_cannot_take_part_says_why(setup):
    peer = child(REFUSING, setup)
    try:
        with pytest.raises(Unavailable, match="no such library"):
            peer.ready()
    finally:
        peer.close()


def test_a_child_that_dies_fails_the_turn_and_the_next_one(setup):
    peer = child(ECHO, setup)
    try:
        peer.ready()
        for _ in range(2):
            with pytest.raises(BenchmarkError, match="ended with 7"):
                peer.measure([[[1]]], 13, deadline_s=60)
    finally:
        peer.close()


def test_a_child_that_is_silent_past_the_deadline_fails_the_turn(setup):
    peer = child("import sys; sys.stdin.read()", setup)
    try:
        with pytest.raises(BenchmarkError, match="no answer within 0 s"):
            peer.measure([[[1]]], 1, deadline_s=0)
    finally:
        peer.close()


def test_transformers_generates_as_many_tokens_as_it_is_asked_for(setup):
    engine = open_peer("transformers-float32", setup)
    try:
        prompts = [Prompt("", (5, 6, 7)), Prompt("", (8, 9, 10))]
        turn = engine.measure([prompts, prompts], 5)
        assert [timing.output_tokens for timing in turn.requests] == [5] * 4
        assert all(0 < timing.ttft_s < timing.ended_s - timing.sent_s for timing in turn.requests)
        assert turn.requests[2].sent_s >= turn.requests[0].ended_s, "a batch waits for the one before it"
        assert engine.version.startswith("transformers 5")
    finally:
        engine.close()


@pytest.mark.parametrize("name", [name for name in PEERS if not name.startswith("transformers")])
def test_a_peer_that_lacks_something_says_what(name, setup):
    with pytest.raises(Unavailable, match=r"not installed|no GGUF file"):
        open_peer(name, setup)
