"""Processes found by the folder they run in, and ended for certain.

Ray starts processes that start processes, some of which outlive a killed driver and rename themselves. All inherit
the working folder of the launcher, which the kernel shows and nobody changes: a cluster whose launcher runs in a
folder of its own can always find what belongs to it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none. With its pid, this names a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def processes_in(folder: Path) -> list[int]:
    """Pids of all processes whose working folder is `folder`, this one excepted."""
    wanted = os.path.realpath(folder)
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        # Gone meanwhile, a zombie, or somebody else's.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{entry.name}/cwd").removesuffix(" (deleted)") == wanted:
                found.append(int(entry.name))
    return found


def end_processes(pids: Iterable[int], *, polite_s: float, forced_s: float = 5.0) -> list[int]:
    """SIGTERM, and SIGKILL for what is left after `polite_s`; returns the pids that even that did not end."""
    held = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            held[pid] = os.pidfd_open(pid)  # so that a pid that is given to another process meanwhile is safe
    try:
        for number, wait_s in ((signal.SIGTERM, polite_s), (signal.SIGKILL, forced_s)):
            for process in held.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, number)
            _drop_ended(held, wait_s)
        return list(held)
    finally:
        for process in held.values():
            os.close(process)


def _drop_ended(held: dict[int, int], wait_s: float) -> None:
    """Wait at most `wait_s` for the processes behind the pidfds, and take out those that ended."""
    until_s = time.monotonic() + wait_s
    while held:
        left_s = max(0.0, until_s - time.monotonic())
        ended, _, _ = select.select(list(held.values()), [], [], left_s)
        for pid, process in list(held.items()):
            if process in ended:
                os.close(held.pop(pid))
        if not left_s:
            return
