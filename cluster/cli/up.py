"""`headrace up`: start a cluster, in the foreground or as a daemon."""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster.catalog import CatalogError
from cluster.cli.chat import ChatClient, ChatError
from cluster.cli.errors import CommandError
from cluster.launch import Addresses, AlreadyRunning, ClusterHome, LaunchError, PortTaken
from cluster.launch.launcher import ClusterLauncher
from cluster.launch.progress import Progress
from cluster.launch.signals import StopAsked, StopSignals
from cluster.spec import LoadedSpec, SpecError, default_spec, load_spec

INTERRUPTED = 130
"""Exit code where somebody asked to stop before the cluster was ready."""
POLL_S = 0.05
ASK_TOKENS = 128
"""Longest answer to `--ask`: it is a sign of life."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("up", help="start a cluster on this machine", description="Start a cluster.")
    parser.add_argument(
        "--spec", type=Path, metavar="FILE", help="what to start; without it, what `headrace spec` prints"
    )
    parser.add_argument("--detach", action="store_true", help="return when it is ready; `headrace down` stops it")
    parser.add_argument("--ask", metavar="TEXT", help="once ready, ask this and print the answer as it streams")
    parser.add_argument("--daemon", action="store_true", help=argparse.SUPPRESS)  # the process behind --detach
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        loaded = load_spec(arguments.spec) if arguments.spec else default_spec()
    except SpecError as error:
        raise CommandError(str(error)) from error
    home = ClusterHome(loaded.spec.cluster)
    if arguments.detach:
        return _detached(home, arguments.spec, arguments.ask)
    return _foreground(loaded, home, arguments)


def _foreground(loaded: LoadedSpec, home: ClusterHome, arguments: argparse.Namespace) -> int:
    """Start, keep, and stop on Ctrl-C. A second Ctrl-C stops without waiting for anything."""
    progress = Progress(sys.stdout)
    try:
        with StopSignals() as signals, home.hold():
            progress.line(f"starting cluster {home.cluster}: {loaded.document.name}")
            launcher = ClusterLauncher(loaded, home, progress, signals)
            signals.on_second = launcher.kill
            try:
                return _run(launcher, home, progress, signals, arguments)
            finally:
                launcher.stop()
                progress.line("stopped")
    except (LaunchError, PortTaken, AlreadyRunning, SpecError, CatalogError) as error:
        raise CommandError(str(error)) from error


def _run(
    launcher: ClusterLauncher,
    home: ClusterHome,
    progress: Progress,
    signals: StopSignals,
    arguments: argparse.Namespace,
) -> int:
    is_ready = False
    try:
        addresses = launcher.start()
        is_ready = True
        progress.line(_welcome(addresses, home, progress.elapsed_s))
        if arguments.ask is not None:
            with signals.at_once():
                _ask(addresses, arguments.ask)
        if not arguments.daemon:
            progress.line("\nCtrl-C stops everything.")
        try:
            launcher.watch()
        except LaunchError as error:
            print(f"headrace: {error}", file=sys.stderr, flush=True)
            launcher.kill(exit_code=1)
    except StopAsked as stop:
        progress.line(f"\n{stop}: stopping; once more stops at once")
        return 0 if is_ready else INTERRUPTED


def _detached(home: ClusterHome, spec: Path | None, ask: str | None) -> int:
    """Run the same command as a daemon, and show what it says until it is ready."""
    launcher = home.launcher()
    if launcher is not None and launcher.alive:
        raise CommandError(str(AlreadyRunning(home.cluster, launcher.pid)))
    command = [sys.executable, "-m", "cluster.cli", "up", "--daemon"]
    command += ["--spec", str(spec.resolve())] if spec else []
    home.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(home.launcher_log, "w+b", buffering=0) as said, StopSignals() as signals:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True, cwd="/"
        )
        signals.on_second = lambda: child.send_signal(signal.SIGTERM)
        try:
            with signals.at_once():
                addresses = _await_ready(home, child, said.name)
        except StopAsked:
            child.send_signal(signal.SIGTERM)
            print("\nstopping what has been started; Ctrl-C stops it at once", flush=True)
            child.wait()
            return INTERRUPTED
    if ask is not None:
        _ask(addresses, ask)
    print(f"\nIt runs in the background as process {child.pid}; `headrace down` stops it.")
    return 0


def _await_ready(home: ClusterHome, child: subprocess.Popen[bytes], log: str) -> Addresses:
    """Show the log as it grows. Raises CommandError with the rest of it if the child ends."""
    with open(log, encoding="utf-8", errors="replace") as lines:
        while True:
            code = child.poll()
            addresses = home.addresses()
            fresh = lines.read()
            if code is not None:
                shown, _, failure = fresh.rpartition("headrace: ")
                sys.stdout.write(shown)
                raise CommandError(failure.strip() or f"the launcher ended with {code}; see {log}", exit_code=code or 1)
            sys.stdout.write(fresh)
            sys.stdout.flush()
            if addresses is not None and addresses.launcher_pid == child.pid:
                return addresses
            time.sleep(POLL_S)


def _welcome(addresses: Addresses, home: ClusterHome, elapsed_s: float) -> str:
    return f"""cluster {addresses.cluster} is ready after {elapsed_s:.1f} s

  OpenAI API  http://{addresses.http}/v1
  gRPC        {addresses.grpc}
  models      {", ".join(addresses.models)}
  logs        {home.logs}"""


def _ask(addresses: Addresses, text: str) -> None:
    """Show one streamed answer. A cluster that does not answer is worth a line, and goes on."""
    print(f"\n> {text}", flush=True)
    begun_s, first_s = time.monotonic(), None
    try:
        messages = [{"role": "user", "content": text}]
        for piece in ChatClient(addresses.http, addresses.models[0]).stream(messages, max_tokens=ASK_TOKENS):
            first_s = first_s or time.monotonic() - begun_s
            print(piece, end="", flush=True)
        print(f"\n(first token after {first_s or 0.0:.2f} s)", flush=True)
    except ChatError as error:
        logging.getLogger(__name__).warning("no answer: %s", error)
