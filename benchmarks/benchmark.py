"""The order of a run: an idle Headrace and idle peers, each working in its turn; then the cancels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.cancel import LONGER, measure_cancels
from benchmarks.cluster import Cluster, own_cluster, running_cluster
from benchmarks.config import ServeConfig
from benchmarks.engines import Engine, HttpEngine
from benchmarks.errors import BenchmarkError, Unavailable
from benchmarks.machine import cpu_seconds
from benchmarks.peers import open_peer
from benchmarks.peers.setup import PeerSetup
from benchmarks.prompts import PromptSource
from benchmarks.result import HEADRACE, Findings
from cluster.launch.models import model_source
from cluster.spec import Spec
from engine.config import load_config
from engine.tokenizer import load_tokenizer

WARM_UP_TOKENS = 8


class Benchmark:
    """One run. Only one engine works at a time; those that wait keep their processes."""

    def __init__(
        self, config: ServeConfig, spec: Spec, folder: Path, runner: asyncio.Runner, say: Callable[[str], None]
    ) -> None:
        """folder: for everything that is written. say: gets a line of progress now and then.

        Raises BenchmarkError for a config that the model is too small for.
        """
        self._config = config
        self._spec = spec
        self._home = folder / "home"
        self._runner = runner
        self._say = say
        self._findings = Findings()
        self.source = model_source(spec.models[0])
        self._prompts = PromptSource(
            load_tokenizer(self.source),
            config.prompt_tokens,
            shared_prefix_tokens=config.shared_prefix_tokens,
            seed=config.seed,
        )
        self._peer_setup = PeerSetup(
            source=self.source,
            folder=folder,
            cores=sorted(os.sched_getaffinity(0)),
            runner=runner,
            llama_python=config.llama_python or sys.executable,
            vllm_python=config.vllm_python,
        )
        longest = config.prompt_tokens + config.output_tokens * (LONGER if config.cancels else 1)
        if longest > (context_tokens := load_config(self.source).context_tokens):
            raise BenchmarkError(f"{longest} tokens in and out do not fit the model's context of {context_tokens}")

    def run(self) -> Findings:
        """Minutes. Raises BenchmarkError; whatever was started is stopped then, too."""
        with self._cluster(self._spec) as cluster:
            self._take_turns(cluster)
            if self._config.url is not None:
                self._cancel(cluster)
        if self._config.url is None and self._config.cancels:
            # A cluster of its own: with so many load reports, idle processes would take from the peers' cores.
            timing = self._spec.timing.model_copy(update={"heartbeat_s": self._config.cancel_heartbeat_s})
            with self._cluster(self._spec.model_copy(update={"timing": timing})) as cluster:
                self._cancel(cluster)
        return self._findings

    @contextlib.contextmanager
    def _cluster(self, spec: Spec) -> Iterator[Cluster]:
        if self._config.url is not None:
            yield running_cluster(self._config.url, self.source.name, self._config.control)
            return
        self._say(f"starting a cluster, with a load report every {spec.timing.heartbeat_s} s")
        with own_cluster(spec, self._home) as cluster:
            yield cluster
            self._say("stopping the cluster")

    def _take_turns(self, cluster: Cluster) -> None:
        findings = self._findings
        with contextlib.ExitStack() as stack:
            engines = list(self._engines(cluster, stack))
            findings.engines = {engine.name: f"{engine.version}; {engine.kind}" for engine in engines}
            findings.turns = {each.name: {streams: [] for streams in self._config.streams} for each in engines}
            for repeat in range(self._config.repeats):
                for streams in self._config.streams:
                    # Forth and back, so that none always follows the same one.
                    for engine in engines if repeat % 2 == 0 else reversed(engines):
                        self._say(f"repeat {repeat + 1} of {self._config.repeats}: {streams} streams, {engine.name}")
                        self._turn(engine, streams, cluster)

    def _engines(self, cluster: Cluster, stack: contextlib.ExitStack) -> Iterator[Engine]:
        """Headrace, then the peers that can take part, each warm. stack: closes them."""
        for name in (HEADRACE, *self._config.peers):
            self._say(f"starting {name} and warming it up")
            try:
                engine = self._open(name, cluster)
            except Unavailable as reason:
                self._findings.absent[name] = str(reason)
                self._say(f"{name} takes no part: {reason}")
                continue
            stack.callback(engine.close)
            for streams in self._config.streams:  # compile kernels, touch memory, open connections
                tokens = min(WARM_UP_TOKENS, self._config.output_tokens)
                engine.measure(self._prompts.rounds(1, streams), tokens)
            yield engine

    def _open(self, name: str, cluster: Cluster) -> Engine:
        if name == HEADRACE:
            return HttpEngine(HEADRACE, _described(self._spec, self._config), cluster.target, self._runner)
        return open_peer(name, self._peer_setup)

    def _turn(self, engine: Engine, streams: int, cluster: Cluster) -> None:
        rounds = self._prompts.rounds(self._config.rounds, streams)
        idle = cluster.pids() if engine.name != HEADRACE else []
        begun_s, cpu_s = time.monotonic(), cpu_seconds(idle)
        turn = engine.measure(rounds, self._config.output_tokens)
        if idle:
            self._findings.idle_cores.append((cpu_seconds(idle) - cpu_s) / (time.monotonic() - begun_s))
        self._findings.turns[engine.name][streams].append(turn)

    def _cancel(self, cluster: Cluster) -> None:
        config = self._config
        if cluster.control is None or not config.cancels:
            return
        self._say(f"cancelling {config.cancels} requests")
        (prompts,) = self._prompts.rounds(1, config.cancels + 2)
        self._findings.cancels = self._runner.run(
            measure_cancels(cluster.target, cluster.control, prompts, config.output_tokens, seed=config.seed)
        )


def _described(spec: Spec, config: ServeConfig) -> str:
    if config.url is not None:
        return f"as it runs at {config.url}"
    groups = [*spec.prefill, *spec.decode]
    num_prefill, num_workers = sum(group.replicas for group in spec.prefill), sum(group.replicas for group in groups)
    auto = max(1, len(os.sched_getaffinity(0)) // num_workers)  # as the launcher divides them
    threads = "/".join(str(auto if group.threads == "auto" else group.threads) for group in groups)
    return (
        f"{num_prefill} prefill and {num_workers - num_prefill} decode workers with {threads} threads, "
        f"{spec.kv.replicas} storage nodes"
    )
