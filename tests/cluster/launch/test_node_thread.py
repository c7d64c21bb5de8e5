"""The life of a node in its process, with nodes that do little."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from cluster.launch.node_thread import NodeThread, Started, StartFailed

DEADLINE_S = 20.0


class QuietNode:
    """Starts and stops, and remembers that it did."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.events: list[str] = []

    async def start(self) -> None:
        self.events.append("start")

    async def stop(self) -> None:
        self.events.append("stop")


class BrokenNode(QuietNode):
    async def start(self) -> None:
        raise OSError("no such device\nsecond line")


class BlockedNode(QuietNode):
    """Blocks its event loop until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    async def start(self) -> None:
        asyncio.get_running_loop().call_soon(self.let_go.wait, DEADLINE_S)


class MortalNode(QuietNode):
    """Says that it has ended when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    async def wait_ended(self) -> str:
        await asyncio.to_thread(self.over.wait, DEADLINE_S)
        return "the step loop crashed"

    async def stop(self) -> None:
        await super().stop()
        self.over.set()


class UnstoppableNode(QuietNode):
    async def stop(self) -> None:
        raise RuntimeError("cannot stop")


def never() -> None:
    raise AssertionError("the node must not end by an error")


def test_a_node_starts_serves_and_stops() -> None:
    node = QuietNode()
    thread = NodeThread("n", lambda: node, never)
    thread.start()
    assert thread.outcome() == Started(address="127.0.0.1:1", http_address="", pid=os.getpid())
    assert thread.answers(DEADLINE_S)
    assert thread.stop(DEADLINE_S)
    assert thread.stop(DEADLINE_S)
    assert thread.answers(0.0)
    assert node.events == ["start", "stop"]


def test_a_node_that_does_not_start_is_stopped_and_says_why() -> None:
    node = BrokenNode()
    thread = NodeThread("n", lambda: node, never)
    thread.start()
    outcome = thread.outcome()
    assert isinstance(outcome, StartFailed)
    assert outcome.reason == "OSError: no such device"
    assert "Traceback" in outcome.details
    assert thread.stop(DEADLINE_S)
    assert node.events == ["stop"]


def test_a_node_that_cannot_be_built_says_why() -> None:
    def build() -> QuietNode:
        raise ValueError("page_size must be >= 1")

    thread = NodeThread("n", build, never)
    thread.start()
    outcome = thread.outcome()
    assert isinstance(outcome, StartFailed)
    assert outcome.reason == "ValueError: page_size must be >= 1"


def test_an_event_loop_that_is_blocked_does_not_answer() -> None:
    node = BlockedNode()
    thread = NodeThread("n", lambda: node, never)
    thread.start()
    thread.outcome()
    begun_s = time.monotonic()
    while thread.answers(0.01):  # until the loop has come to what blocks it
        assert time.monotonic() - begun_s < DEADLINE_S
    node.let_go.set()
    assert thread.answers(DEADLINE_S)
    assert thread.stop(DEADLINE_S)


def test_a_node_that_ends_by_itself_is_stopped_and_its_process_replaced(caplog: pytest.LogCaptureFixture) -> None:
    node, ended = MortalNode(), threading.Event()
    thread = NodeThread("n", lambda: node, ended.set)
    thread.start()
    assert isinstance(thread.outcome(), Started)
    assert not ended.is_set()
    node.over.set()
    assert ended.wait(DEADLINE_S)
    assert node.events == ["start", "stop"]
    assert "the step loop crashed" in caplog.text


def test_a_node_that_is_stopped_ends_nothing_else() -> None:
    node = MortalNode()
    thread = NodeThread("n", lambda: node, never)
    thread.start()
    thread.outcome()
    assert thread.stop(DEADLINE_S)


def test_a_node_that_fails_to_stop_ends_its_process() -> None:
    ended = threading.Event()
    thread = NodeThread("n", UnstoppableNode, ended.set)
    thread.start()
    thread.outcome()
    assert thread.stop(DEADLINE_S)
    assert ended.wait(DEADLINE_S)
