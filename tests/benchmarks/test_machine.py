"""What is said about the machine under the numbers."""

from __future__ import annotations

import os

from benchmarks.machine import look_at_machine, read_bandwidth


def test_the_machine_is_described_from_its_own_files():
    machine = look_at_machine()
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.memory_bytes > 0
    assert machine.cpu


def test_reading_memory_takes_some_time_and_no_more_than_that():
    assert 0 < read_bandwidth(2, num_bytes=1 << 20) < float("inf")
