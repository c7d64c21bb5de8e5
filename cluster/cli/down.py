"""`headrace down`: stop a cluster and whatever is left of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import time

from cluster.cli.errors import CommandError
from cluster.cli.which import running_cluster
from cluster.launch import AlreadyRunning, ClusterHome, running_clusters, stale_clusters

STEPS = ((signal.SIGTERM, 45.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))
"""What the launcher is sent, and the seconds that it gets to end: a clean stop, a quick one, none."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("down", help="stop it", description="Stop a cluster; running requests may finish.")
    parser.add_argument("--cluster", metavar="NAME", help="which cluster, where several run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.cluster not in running_clusters() and (arguments.cluster or not running_clusters()):
        stale = stale_clusters()
        names = [name for name in stale if arguments.cluster in (None, name)]
        for name in names:
            _clear(ClusterHome(name))
        if not names:
            print(f"no cluster {arguments.cluster or ''} runs here".replace("  ", " "))
        return 0
    home = running_cluster(arguments.cluster)
    launcher = home.launcher()
    if launcher is None:
        print(f"cluster {home.cluster} has just stopped")
        return 0
    print(f"stopping cluster {home.cluster} (process {launcher.pid})", flush=True)
    begun_s = time.monotonic()
    if not _end(launcher.pid):
        raise CommandError(f"process {launcher.pid} cannot be ended")
    _clear(home, quiet=True)
    print(f"stopped after {time.monotonic() - begun_s:.1f} s")
    return 0


def _end(pid: int) -> bool:
    """Whether the launcher has ended."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            for number, wait_s in STEPS:
                signal.pidfd_send_signal(process, number)
                if select.select([process], [], [], wait_s)[0]:
                    return True
            return False
        finally:
            os.close(process)
    return True


def _clear(home: ClusterHome, *, quiet: bool = False) -> None:
    """Clear away what a launcher that was killed left behind; nothing is left by one that stopped by itself."""
    try:
        with home.hold():
            left = home.clear()
    except AlreadyRunning:  # started again meanwhile
        return
    if not quiet or left:
        ended = f"; ended processes {left}" if left else ""
        print(f"cleared away what was left of cluster {home.cluster}{ended}")
