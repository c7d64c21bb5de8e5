"""Peers that compute a fixed batch, without a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.engines import Engine
from benchmarks.errors import Unavailable
from benchmarks.load import REQUEST_DEADLINE_S
from benchmarks.peers.child import Child
from benchmarks.peers.setup import PeerSetup
from benchmarks.prompts import Prompt
from benchmarks.turn import Turn


class BatchEngine(Engine):
    """One batch per round. No tokenising, queueing or network: an upper bound for a server made of the same engine."""

    kind = "fixed batch, no server"

    def __init__(self, name: str, python: str, arguments: Sequence[str], setup: PeerSetup) -> None:
        """arguments: the child's module and its arguments."""
        self.name = name
        self._child = Child(name, [python, "-m", *arguments], setup.environment, setup.folder / f"{name}.log")
        try:
            self.version = self._child.ready()
        except BaseException:
            self._child.close()
            raise

    def measure(self, rounds: Sequence[Sequence[Prompt]], output_tokens: int) -> Turn:
        ids = [[prompt.token_ids for prompt in prompts] for prompts in rounds]
        return Turn(requests=tuple(self._child.measure(ids, output_tokens, REQUEST_DEADLINE_S * len(rounds))))

    def close(self) -> None:
        self._child.close()


def transformers_batch(name: str, dtype: str, setup: PeerSetup) -> Engine:
    """`generate`, with the values of Headrace's weights computed in `dtype`."""
    module = "benchmarks.peers.transformers_child"
    arguments = ["--weights", str(setup.huggingface_folder), "--dtype", dtype, "--threads", str(len(setup.cores))]
    return BatchEngine(name, sys.executable, [module, *arguments], setup)


def llama_cpp_batch(name: str, form: str, setup: PeerSetup) -> Engine:
    """llama.cpp's library on the GGUF file; form: what to rewrite it to, "" for as it is."""
    if setup.source.kind != "gguf":
        raise Unavailable("the weights are no GGUF file")
    module = "benchmarks.peers.llama_cpp_child"
    arguments = ["--file", str(setup.source.weights_path()), "--threads", str(len(setup.cores))]
    if form:
        arguments += ["--form", form, "--rewritten", str(setup.folder / f"{form}.gguf")]
    return BatchEngine(name, setup.llama_python, [module, *arguments], setup)
