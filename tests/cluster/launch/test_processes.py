"""Ending processes for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from cluster.launch.processes import end_processes, start_ticks

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def test_a_process_that_ends_on_sigterm_gets_no_more() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        assert end_processes([child.pid], polite_s=10.0) == []
    assert child.returncode == -signal.SIGTERM


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert end_processes([child.pid], polite_s=0.1) == []
    assert child.returncode == -signal.SIGKILL


def test_a_process_that_is_gone_already_is_no_error() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert start_ticks(child.pid) is None
    assert end_processes([child.pid], polite_s=0.1) == []


def test_a_zombie_counts_as_gone() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None
    child.wait()
