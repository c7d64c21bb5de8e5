"""The Headrace under test: a cluster started for the purpose, or one that runs already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.load import Target
from cluster.launch import HOME_VARIABLE, ClusterHome
from cluster.spec import HostPort, Spec, render_spec

CLUSTER = "bench"
START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 90.0
HTTP_DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """One that can serve."""

    target: Target
    control: str | None
    """host:port of the control plane, where it is known."""


@contextlib.contextmanager
def own_cluster(spec: Spec, home: Path) -> Iterator[Cluster]:
    """Start `spec` on free ports, and stop it on the way out, whatever the reason.

    home: a folder of its own, so that other clusters of this machine are not met. Its name must be short: it leads to
    a socket. Raises BenchmarkError with what the launcher said.
    """
    free = spec.gateway.model_copy(update={"http": HostPort("127.0.0.1", 0), "grpc": HostPort("127.0.0.1", 0)})
    spec = spec.model_copy(update={"cluster": CLUSTER, "gateway": free, "catalog": "embedded"})
    home.mkdir(parents=True, exist_ok=True)
    file = home / "spec.yaml"
    file.write_text(render_spec(spec))
    # As `make up` does it; the number of the model's threads is the spec's.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {HOME_VARIABLE: str(home)}

    def headrace(*arguments: str, deadline_s: float) -> None:
        # In a session of its own: a Ctrl-C on our terminal is for us to act upon, in order.
        command = [sys.executable, "-m", "cluster.cli", *arguments]
        with subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                raise BenchmarkError(f"`headrace {arguments[0]}` takes longer than {deadline_s:.0f} s") from None
            except BaseException:
                process.terminate()
                raise
        if process.returncode != 0:
            raise BenchmarkError(f"`headrace {arguments[0]}` failed:\n{said.strip()}")

    try:
        headrace("up", "--detach", "--spec", str(file), deadline_s=START_DEADLINE_S)
        addresses = ClusterHome(CLUSTER, home).addresses()
        if addresses is None:
            raise BenchmarkError("the cluster ended as soon as it was ready")
        yield Cluster(
            target=Target(url=f"http://{addresses.http}", model=addresses.models[0]),
            control=addresses.control,
        )
    finally:
        with _uninterrupted():
            headrace("down", "--cluster", CLUSTER, deadline_s=STOP_DEADLINE_S)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave a cluster behind."""
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def running_cluster(url: str, model: str, control: str | None) -> Cluster:
    """A server that somebody else started. Raises BenchmarkError if it does not answer or lacks the model."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=HTTP_DEADLINE_S) as response:
            models = [entry["id"] for entry in json.load(response)["data"]]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
        raise BenchmarkError(f"{url}/v1/models: {error}") from error
    if model not in models:
        raise BenchmarkError(f"{url} has no model {model}, it has {', '.join(models)}; name its spec with --spec")
    return Cluster(target=Target(url=url, model=model), control=control)
