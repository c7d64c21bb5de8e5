"""The machine under the numbers: what it is, how fast it reads memory, how busy it was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_READ_BYTES = 256 << 20
"""Per thread; several times the largest cache."""
_READS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Everything that does not change while a benchmark runs."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    system: str
    python: str
    torch: str
    headrace: str
    commit: str
    """With "+changes" if files that git tracks differ from it; empty outside a checkout."""


def look_at_machine() -> Machine:
    cores = len(os.sched_getaffinity(0))
    return Machine(
        cpu=_cpu_model(),
        cores=cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        headrace=importlib.metadata.version("headrace"),
        commit=_commit(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What of a machine changes from minute to minute."""

    load_average: float
    """Processes that ran or wanted to, over the last minute."""
    read_bytes_per_s: float
    """All cores together, each reading memory of its own."""
    read_bytes_per_s_of_one: float
    """One core alone."""


def look_at_moment() -> Moment:
    """About a second, of reading memory."""
    return Moment(
        load_average=os.getloadavg()[0],  # first: reading memory is load, too
        read_bytes_per_s=read_bandwidth(len(os.sched_getaffinity(0))),
        read_bytes_per_s_of_one=read_bandwidth(1),
    )


def read_bandwidth(num_threads: int, num_bytes: int = _READ_BYTES) -> float:
    """Bytes per second that `num_threads` threads read together, the best of some passes.

    A maximum over float32: numpy does it with vector instructions, without the lock, and faster than memory delivers.
    """
    arrays = [np.ones(num_bytes // 4, np.float32) for _ in range(num_threads)]
    best_s = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_READS):
            begun_s = time.perf_counter()
            list(pool.map(np.max, arrays))
            best_s = min(best_s, time.perf_counter() - begun_s)
    return num_threads * num_bytes / best_s


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return ""
