"""What `serve_cpu` measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """One run of `serve_cpu`."""

    url: str | None = None
    """A running server to measure; None starts a cluster for the purpose."""
    control: str | None = None
    """host:port of its control plane; without it cancel-to-free is not measured there."""
    spec: Path = ROOT / "deploy/specs/laptop.yaml"
    """The cluster to start, on free ports; with `url`, where its first model's weights are found for the peers."""
    streams: tuple[int, ...] = (1, 4, 16)
    """Numbers of concurrent streams."""
    prompt_tokens: int = 128
    output_tokens: int = 64
    rounds: int = 2
    """Requests of each stream, one after the other, in one turn."""
    repeats: int = 5
    """Turns of each engine at each number of streams."""
    shared_prefix_tokens: int = 0
    """Tokens that all prompts have in common at the front."""
    peers: tuple[str, ...] = PEERS
    llama_python: str | None = None
    """Interpreter that has `llama_cpp`; None: the one that runs the benchmark."""
    vllm_python: str | None = None
    """Interpreter that has vLLM for CPUs."""
    cancels: int = 100
    """Requests cancelled for cancel-to-free; 0 leaves it out."""
    cancel_heartbeat_s: float = 0.05
    """Between two load reports while cancel-to-free is measured; tokens/s are measured with the spec's own."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "rounds", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not self.streams or min(self.streams) < 1 or len(set(self.streams)) < len(self.streams):
            raise ValueError(f"streams must be different numbers >= 1, got {self.streams}")
        if not 0 <= self.shared_prefix_tokens < self.prompt_tokens:
            raise ValueError(f"shared_prefix_tokens must lie in [0, prompt_tokens), got {self.shared_prefix_tokens}")
        if unknown := set(self.peers) - set(PEERS):
            raise ValueError(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
        if self.cancels < 0:
            raise ValueError(f"cancels must be >= 0, got {self.cancels}")
        if self.cancel_heartbeat_s <= 0:
            raise ValueError(f"cancel_heartbeat_s must be > 0, got {self.cancel_heartbeat_s}")
        if self.control is not None and self.url is None:
            raise ValueError("control goes with url")


QUICK: dict[str, Any] = {
    "streams": (1, 2),
    "prompt_tokens": 96,
    "output_tokens": 8,
    "rounds": 1,
    "repeats": 1,
    "cancels": 4,
}
"""A run that shows within minutes that everything works; its numbers mean nothing."""
