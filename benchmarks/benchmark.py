"""The order of a run: Headrace and its peers, each working in its turn; then the cancels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.cancel import LONGER, measure_cancels
from benchmarks.cluster import Cluster, own_cluster, running_cluster
from benchmarks.config import ServeConfig
from benchmarks.engines import Engine, HttpEngine
from benchmarks.errors import BenchmarkError, Unavailable
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
    """One run. Only one engine works at a time; peers that wait keep their processes and use no core."""

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
        with contextlib.ExitStack() as stack:
            peers = list(self._peers(stack))
            self._findings.engines |= {peer.name: f"{peer.version}; {peer.kind}" for peer in peers}
            self._findings.turns = {
                name: {streams: [] for streams in self._config.streams}
                for name in (HEADRACE, *(peer.name for peer in peers))
            }
            for repeat in range(self._config.repeats):
                self._repeat(repeat, peers)
        if self._config.cancels and (self._config.url is None or self._config.control is not None):
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

    @contextlib.contextmanager
    def _headrace(self) -> Iterator[Engine]:
        """Only for its turns: its idle processes would take from the cores of its peers."""
        with self._cluster(self._spec) as cluster:
            engine = HttpEngine(HEADRACE, _described(self._spec, self._config), cluster.target, self._runner)
            try:
                self._findings.engines.setdefault(engine.name, f"{engine.version}; {engine.kind}")
                self._warm_up(engine)
                yield engine
            finally:
                engine.close()

    def _peers(self, stack: contextlib.ExitStack) -> Iterator[Engine]:
        """Those that can take part, each warm and idle. stack: closes them."""
        for name in self._config.peers:
            self._say(f"starting {name} and warming it up")
            try:
                peer = open_peer(name, self._peer_setup)
            except Unavailable as reason:
                self._findings.absent[name] = str(reason)
                self._say(f"{name} takes no part: {reason}")
                continue
            stack.callback(peer.close)
            self._warm_up(peer)
            yield peer

    def _warm_up(self, engine: Engine) -> None:
        """Once at every number of streams: kernels are compiled, memory touched, connections opened."""
        for streams in self._config.streams:
            tokens = min(WARM_UP_TOKENS, self._config.output_tokens)
            engine.measure(self._prompts.rounds(1, streams), tokens)

    def _repeat(self, repeat: int, peers: Sequence[Engine]) -> None:
        """A turn of every engine at every number of streams, all with the same prompts."""
        self._say(f"repeat {repeat + 1} of {self._config.repeats}")
        trace = {streams: self._prompts.rounds(self._config.rounds, streams) for streams in self._config.streams}
        # Forth and back, so that none always follows the same one.
        for engine in [None, *peers] if repeat % 2 == 0 else [*reversed(peers), None]:
            with self._headrace() if engine is None else contextlib.nullcontext(engine) as ready:
                for streams, rounds in trace.items():
                    self._say(f"{ready.name}, {streams} streams")
                    turn = ready.measure(rounds, self._config.output_tokens)
                    self._findings.turns[ready.name][streams].append(turn)

    def _cancel(self, cluster: Cluster) -> None:
        config = self._config
        assert cluster.control is not None
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
