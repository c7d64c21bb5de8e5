"""What every peer is told."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import Unavailable
from benchmarks.weights import huggingface_folder
from engine.source import ModelSource


@dataclass(frozen=True, kw_only=True)
class PeerSetup:
    """One for all peers of a run."""

    source: ModelSource
    """The model that Headrace serves."""
    folder: Path
    """For what is written: weights in a peer's form, logs. Removed by whoever made it."""
    cores: Sequence[int]
    """To compute on, a thread on each."""
    runner: asyncio.Runner
    """For peers that are servers."""
    llama_python: str
    """Interpreter that has `llama_cpp`."""
    vllm_python: str | None
    """Interpreter that has vLLM for CPUs; None: there is none."""

    @functools.cached_property
    def huggingface_folder(self) -> Path:
        """The weights as transformers and vLLM read them, written at the first use. Raises Unavailable."""
        try:
            return huggingface_folder(self.source, self.folder / "weights")
        except ValueError as error:
            raise Unavailable(f"these weights cannot be handed to it: {error}") from error

    @property
    def environment(self) -> dict[str, str]:
        """Of a peer's process: a thread per core, and nothing fetched."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(len(self.cores)))
        return os.environ | threads | {"HF_HUB_OFFLINE": "1"}
