"""A real cluster for tests, started and stopped by the `headrace` command like anybody's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.cli.status import as_dict
from cluster.launch import Addresses
from protos import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

START_S = 240.0
DEADLINE_S = 120.0
POLL_S = 0.05


class Cluster:
    """What a test does with the cluster. Waits have deadlines; nothing is killed that the cluster did not start."""

    def __init__(self, home: Path, spec: Path) -> None:
        self._environment = os.environ | {"HEADRACE_HOME": str(home)}
        self._spec = spec

    def start(self) -> None:
        self.headrace("up", "--detach", "--spec", str(self._spec), deadline_s=START_S)
        self._addresses = Addresses(**self.status()["addresses"])
        self.url = f"http://{self._addresses.http}"
        self._channels = [grpc.insecure_channel(address) for address in (self._addresses.grpc, self._addresses.control)]
        self.inference = inference_pb2_grpc.InferenceServiceStub(self._channels[0])
        self.control = control_pb2_grpc.ControlServiceStub(self._channels[1])
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def stop(self) -> None:
        self.http.close()
        for channel in self._channels:
            channel.close()
        self.headrace("down")

    def headrace(self, *arguments: str, deadline_s: float = DEADLINE_S) -> str:
        """Run a command; returns what it printed. Raises AssertionError with all of its output if it fails."""
        command = [str(Path(sys.executable).parent / "headrace"), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=deadline_s)
        assert done.returncode == 0, f"headrace {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def status(self) -> dict[str, Any]:
        """What `headrace status --json` prints; about a second, most of it the command's start."""
        return json.loads(self.headrace("status", "--json"))

    def workers(self) -> dict[str, dict[str, Any]]:
        """Registered nodes by id, as `headrace status --json` has them, asked for directly."""
        response = self.control.GetStatus(control_pb2.GetStatusRequest(), timeout=DEADLINE_S)
        return {worker["node_id"]: worker for worker in as_dict(self._addresses, {}, response)["workers"]}

    def until(self, condition: Callable[[dict[str, dict[str, Any]]], bool], what: str) -> dict[str, dict[str, Any]]:
        """Wait until the workers are as they should be; returns them. Waits for a control plane that is away, too."""
        end_s = time.monotonic() + DEADLINE_S
        workers: dict[str, dict[str, Any]] = {}
        while time.monotonic() < end_s:
            try:
                if condition(workers := self.workers()):
                    return workers
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            time.sleep(POLL_S)
        raise AssertionError(f"not within {DEADLINE_S} s: {what}\n{json.dumps(workers, indent=1)}")

    def until_idle(self) -> dict[str, dict[str, Any]]:
        """Nothing runs, and every page is free or evictable, without new work coming in."""

        def idle(workers: dict[str, dict[str, Any]]) -> bool:
            own = [worker for worker in workers.values() if worker["role"] in ("prefill", "decode")]
            return all(
                worker["pages_free"] == worker["pages_total"] and not worker["running"] + worker["waiting"]
                for worker in own
            )

        return self.until(idle, "all pages free")

    def kill(self, node_id: str) -> None:
        """SIGKILL a registered node's process: at once, not after a command's start, so that it dies at its work."""
        os.kill(self.workers()[node_id]["pid"], signal.SIGKILL)

    def retries(self) -> int:
        """Attempts that the gateway has placed anew so far, whatever for."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return int(sum(sample.value for sample in samples if sample.name == "headrace_retries_total"))

    def until_back(self, node_id: str, incarnation: str) -> None:
        """Wait until a restarted node serves again."""
        self.until(
            lambda workers: (
                node_id in workers and workers[node_id]["ready"] and workers[node_id]["incarnation"] != incarnation
            ),
            f"{node_id} is back",
        )

    def flush(self) -> None:
        """Empty the workers' own caches into the storage nodes, as `headrace flush` does."""
        self.control.EvictPrefixes(control_pb2.EvictPrefixesRequest(), timeout=DEADLINE_S)
        self.until(
            lambda workers: not any(w["pages_cached"] for w in workers.values() if w["role"] in ("prefill", "decode")),
            "no page in a worker's cache",
        )

    def generate(self, model: str, token_ids: list[int], max_tokens: int) -> tuple[list[int], inference_pb2.Usage]:
        """Greedy output token ids, by gRPC, and the usage."""
        request = inference_pb2.GenerateRequest(
            model=model,
            token_ids=inference_pb2.TokenIds(token_ids=token_ids),
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        tokens: list[int] = []
        for response in self.inference.Generate(request, timeout=DEADLINE_S):
            tokens.extend(response.token_ids)
            usage = response.usage
        return tokens, usage

    def stream(self, body: dict[str, Any], *, path: str = "/v1/completions") -> Iterator[dict[str, Any]]:
        """Events of a streamed answer; closing the iterator hangs up."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


@contextmanager
def running(home: Path, spec: Path) -> Iterator[Cluster]:
    cluster = Cluster(home, spec)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
