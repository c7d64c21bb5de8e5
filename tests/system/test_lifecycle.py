"""Starting and stopping a cluster, in good order and not: nothing is left behind, and errors say why."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.launch import HOME_VARIABLE, ClusterHome
from cluster.launch.processes import processes_in, start_ticks
from tests.models import tiny_model, tiny_tokenizer

DEADLINE_S = 240.0
PROXIES = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "ALL_PROXY")}
"""A proxy that is not there: what goes on inside a cluster must not ask for it."""
SPEC = """
cluster: small
models: [{{name: tiny, weights: "{weights}", config: {folder}}}]
prefill: []
decode: [{{pool_bytes: 4MiB, threads: 1}}]
kv: {{replicas: 0}}
gateway: {{http: "127.0.0.1:{http}", grpc: "127.0.0.1:0"}}
timing: {{hang_s: 15}}
"""


class Terminal:
    """One `headrace` command as a person runs it: its output is read, signals are sent to it."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._output = home / f"output-{time.monotonic_ns()}"
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / "headrace"), *arguments],
                env=os.environ | {HOME_VARIABLE: str(home)} | PROXIES,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._output.read_text()

    def until(self, words: str) -> None:
        eventually(lambda: words in self.text or self.process.poll() is not None, f"{words!r} in {self._output}")
        assert words in self.text, self.text

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_S)


def eventually(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The folder of the test's clusters; when the test ends, nothing of them may be left."""
    yield tmp_path
    launcher = ClusterHome("small", tmp_path).launcher()
    if launcher is not None:
        subprocess.run(
            [str(Path(sys.executable).parent / "headrace"), "down"], env=os.environ | {HOME_VARIABLE: str(tmp_path)}
        )
    assert launcher is None, "the cluster had not been cleared away"


def spec(home: Path, folder: Path, *, weights: str = "random:7", http: int = 0) -> str:
    path = home / "small.yaml"
    path.write_text(SPEC.format(folder=folder, weights=weights, http=http))
    return str(path)


def run_folder(home: Path) -> Path:
    launcher = ClusterHome("small", home).launcher()
    assert launcher is not None
    return Path(launcher.run_folder)


def nothing_left(folder: Path) -> bool:
    return not folder.exists() and not processes_in(folder / "cwd")


def test_a_cluster_in_the_foreground_from_start_to_ctrl_c(home: Path, folder: Path) -> None:
    up = Terminal(home, "up", "--spec", spec(home, folder), "--ask", "hello")
    up.until("Ctrl-C stops everything")
    assert "(first token after" in up.text
    run, cluster = run_folder(home), ClusterHome("small", home)

    second = Terminal(home, "up", "--spec", spec(home, folder))
    assert second.exit_code() == 1
    assert f"cluster small runs already (process {up.process.pid}): `headrace status`" in second.text

    addresses, pids = cluster.addresses(), cluster.processes()
    assert addresses is not None
    assert set(pids) == {"control", "decode-0", "gateway-0"}
    os.kill(pids["gateway-0"], signal.SIGKILL)
    up.until(f"gateway-0 (process {pids['gateway-0']}) died")
    eventually(lambda: cluster.processes()["gateway-0"] != pids["gateway-0"], "another process for the gateway")
    os.kill(pids["decode-0"], signal.SIGSTOP)
    up.until(f"decode-0 (process {pids['decode-0']}) does not answer")
    eventually(lambda: cluster.processes()["decode-0"] != pids["decode-0"], "another process for the worker")
    status = Terminal(home, "status", "--json")
    assert status.exit_code() == 0
    assert json.loads(status.text)["addresses"]["http"] == addresses.http
    again = Terminal(home, "chat", "--once", "hello", "--max-tokens", "3")
    assert again.exit_code() == 0, again.text

    up.interrupt()
    assert up.exit_code() == 0
    assert up.text.endswith("stopped\n")
    assert nothing_left(run)
    assert all(start_ticks(pid) is None for pid in pids.values())
    assert cluster.addresses() is None


def test_ctrl_c_while_it_starts_stops_what_has_been_started(home: Path, folder: Path) -> None:
    up = Terminal(home, "up", "--spec", spec(home, folder))
    up.until("  catalog ")  # Ray is next, and takes seconds
    run = run_folder(home)
    up.interrupt()
    assert up.exit_code() == 130
    assert nothing_left(run)


def test_a_cluster_whose_launcher_was_killed_can_be_started_again_and_stopped_at_once(home: Path, folder: Path) -> None:
    detached = Terminal(home, "up", "--detach", "--spec", spec(home, folder))
    assert detached.exit_code() == 0, detached.text
    first, launcher = run_folder(home), ClusterHome("small", home).launcher()
    assert launcher is not None
    os.kill(launcher.pid, signal.SIGKILL)

    up = Terminal(home, "up", "--spec", spec(home, folder))
    up.until("ended what an earlier run had left behind")
    assert nothing_left(first)
    up.until("Ctrl-C stops everything")
    second = run_folder(home)
    up.interrupt()
    up.until("once more stops at once")
    up.interrupt()
    assert up.exit_code() in (0, 137)  # 0 if the clean stop was quicker
    assert nothing_left(second)


def test_a_cluster_whose_ray_dies_ends_with_an_error_instead_of_waiting(home: Path, folder: Path) -> None:
    up = Terminal(home, "up", "--spec", spec(home, folder))
    up.until("Ctrl-C stops everything")
    run = run_folder(home)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in processes_in(run / "cwd")}
    os.kill(next(pid for pid, command in commands.items() if command.endswith(b"/raylet")), signal.SIGKILL)
    assert up.exit_code() == 1
    assert "headrace: Ray's raylet died" in up.text
    assert nothing_left(run)


def test_a_node_that_cannot_start_stops_the_cluster_and_says_why(home: Path, folder: Path) -> None:
    empty = tiny_model(home / "no-weights")
    up = Terminal(home, "up", "--spec", spec(home, folder, weights=str(empty)))
    assert up.exit_code() == 1
    assert "headrace: decode-0: BrokenCheckpoint" in up.text
    assert str(home / "small" / "logs" / "decode-0.log") in up.text


def test_a_taken_port_is_named_before_anything_starts(home: Path, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        up = Terminal(home, "up", "--spec", spec(home, folder, http=port))
        assert up.exit_code() == 1
        assert (
            f"headrace: cannot listen on 127.0.0.1:{port}: Address already in use (gateway.http of the spec)" in up.text
        )
