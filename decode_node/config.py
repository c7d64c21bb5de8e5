"""How a decode worker is set up."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_node.core import DecodeCoreConfig
from engine.core import EngineConfig
from engine.source import ModelSource
from kvstore.pages import WriteBackConfig
from kvstore.plane import PlaneConfig
from protos.registration import NodeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    node: NodeConfig
    model: ModelSource
    plane: PlaneConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    core: DecodeCoreConfig = field(default_factory=DecodeCoreConfig)
    write_back: WriteBackConfig = field(default_factory=WriteBackConfig)
    page_size: int = 16
    """Token positions per page; the same in every process that serves the model."""
    threads: int = 1
    """Threads of one step of the model."""

    def __post_init__(self) -> None:
        for name in ("page_size", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
