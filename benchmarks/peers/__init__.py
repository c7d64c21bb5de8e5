"""What Headrace is compared with, on the same weights and cores. Each runs in processes of its own.

Imports nothing that an interpreter of a peer may lack: the children are modules of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.engines import Engine
    from benchmarks.peers.setup import PeerSetup

__all__ = ["PEERS", "open_peer"]

PEERS = (
    "transformers-float32",
    "transformers-bfloat16",
    "llama.cpp",
    "llama.cpp-q8_0",
    "llama.cpp-q4_0",
    "vllm",
)


def open_peer(name: str, setup: PeerSetup) -> Engine:
    """Start one of PEERS and wait until it is idle.

    Raises Unavailable if this machine or this model is not for it, BenchmarkError if it fails.
    """
    if name == "vllm":
        from benchmarks.peers.vllm import VllmServer

        return VllmServer(setup)
    from benchmarks.peers.batch import llama_cpp_batch, transformers_batch

    family, _, form = name.partition("-")
    return transformers_batch(name, form, setup) if family == "transformers" else llama_cpp_batch(name, form, setup)
