"""How a prefill worker is set up."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core import EngineConfig
from engine.source import ModelSource
from kvstore.pages import WriteBackConfig
from kvstore.plane import PlaneConfig
from prefill_node.core import PrefillCoreConfig
from protos.registration import NodeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    node: NodeConfig
    model: ModelSource
    plane: PlaneConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    core: PrefillCoreConfig = field(default_factory=PrefillCoreConfig)
    write_back: WriteBackConfig = field(default_factory=WriteBackConfig)
    page_size: int = 16
    """Token positions per page; the same in every process that serves the model."""
    threads: int = 1
    """Threads of one step of the model."""

    def __post_init__(self) -> None:
        for name in ("page_size", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
