"""vLLM's own server, from an interpreter that has it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

from benchmarks.engines import HttpEngine
from benchmarks.errors import BenchmarkError, Unavailable
from benchmarks.load import Target
from benchmarks.peers.setup import PeerSetup

START_DEADLINE_S = 600.0
"""It compiles the model first."""
STOP_DEADLINE_S = 20.0
KV_GIB = 2
POLL_S = 0.5


class VllmServer(HttpEngine):
    """Same client and same definition of TTFT as for Headrace."""

    def __init__(self, setup: PeerSetup) -> None:
        if setup.vllm_python is None:
            raise Unavailable("not installed (--vllm-python names an interpreter that has it)")
        _check_installed(setup.vllm_python)
        port = _free_port()
        command = [
            *(setup.vllm_python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(setup.huggingface_folder), "--served-model-name", setup.source.name),
            *("--dtype", setup.source.dtype, "--host", "127.0.0.1", "--port", str(port)),
        ]
        environment = setup.environment | {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, setup.cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._log = setup.folder / "vllm.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            self._await_ready(url)
            with urllib.request.urlopen(f"{url}/version", timeout=POLL_S * 10) as response:
                version = json.load(response)["version"]
            super().__init__("vllm", f"vllm {version}", Target(url=url, model=setup.source.name), setup.runner)
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        super().close()
        self._stop()

    def _await_ready(self, url: str) -> None:
        until_s = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                log = self._log.read_text(errors="replace")[-2000:]
                raise BenchmarkError(f"vllm ended with {self._process.returncode} while it started; its log: {log}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=POLL_S * 10):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(POLL_S)
        raise BenchmarkError(f"vllm is not ready after {START_DEADLINE_S:.0f} s; its log: {self._log}")

    def _stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):  # it, if it is still there, and workers that outlived it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _check_installed(python: str) -> None:
    """Without importing it, which takes seconds. Raises Unavailable."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        if subprocess.run([python, "-c", probe], capture_output=True, timeout=60).returncode != 0:
            raise Unavailable(f"not installed in {python}")
    except OSError as error:
        raise Unavailable(f"{python}: {error.strerror}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
