"""What is said about the machine under the numbers."""

from __future__ import annotations

import os
import time

from benchmarks.machine import cpu_seconds, look_at_machine, read_bandwidth


def test_the_machine_is_described_from_its_own_files():
    machine = look_at_machine()
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.memory_bytes > 0
    assert machine.cpu


def test_reading_memory_takes_some_time_and_no_more_than_that():
    assert 0 < read_bandwidth(2, num_bytes=1 << 20) < float("inf")


def test_cpu_time_is_that_of_the_processes_named_and_nothing_for_those_that_ended():
    while time.process_time() < 0.1:
        pass
    mine = cpu_seconds([os.getpid()])
    assert mine > 0
    assert cpu_seconds([]) == 0
    assert cpu_seconds([os.getpid(), 2**22 + 1]) >= mine
