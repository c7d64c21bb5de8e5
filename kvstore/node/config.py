"""What a storage node is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.node.store import StoreBounds
from protos.registration import NodeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """One storage node."""

    node: NodeConfig
    memory_bytes: int
    """For stored pages; taken at the start."""
    transports: tuple[str, ...] = ("nixl",)
    """Ways in which the memory can be reached and reaches others, best first."""
    lossless: bool = True
    """Whether raw pages are compressed when there is time; readers get the same bytes either way."""
    offer_deadline_s: float = 5.0
    """The most that pulling one offer may take; the offering worker may set less."""
    stop_grace_s: float = 0.5
    """How long running requests may go on at a stop."""
    bounds: StoreBounds = field(default_factory=StoreBounds)
    """What clients may take of it."""

    def __post_init__(self) -> None:
        if self.memory_bytes < 1:
            raise ValueError(f"memory_bytes must be >= 1, got {self.memory_bytes}")
        if not self.transports:
            raise ValueError("transports must name at least one")
        if self.offer_deadline_s <= 0:
            raise ValueError(f"offer_deadline_s must be > 0, got {self.offer_deadline_s}")
        if self.stop_grace_s < 0:
            raise ValueError(f"stop_grace_s must be >= 0, got {self.stop_grace_s}")
