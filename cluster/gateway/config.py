"""What an operator can set on a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.router import RouterConfig
from engine.source import ModelSource
from protos.registration import NodeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig:
    """What one client, or all of them, may ask for."""

    max_body_bytes: int = 4 << 20
    """Largest HTTP body."""
    body_timeout_s: float = 30.0
    """How long a client may take to send one."""
    max_open_requests: int = 1024
    """Requests in work; more are refused with 429."""
    off_loop_chars: int = 4096
    """Longer prompts are tokenised on a thread, so that streams go on meanwhile."""

    def __post_init__(self) -> None:
        _positive(self, "max_body_bytes", "body_timeout_s", "max_open_requests")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """How attempts are made, and how often."""

    session_timeout_s: float = 5.0
    """How long a decode worker may take to answer a new session."""
    admission_timeout_s: float = 15.0
    """How long it may take to accept or reject an attempt. It decides between two steps, and a step may be long."""
    placement_timeout_s: float = 30.0
    """How long a request waits for a worker where none is ready, or for room once its client has seen a token."""
    silence_timeout_s: float = 300.0
    """An accepted attempt without any event for so long counts as lost."""
    retry_after_s: float = 1.0
    """What refused clients are told to wait."""
    max_lost_workers: int = 4
    """Workers that one request may lose. It may be what kills them."""
    max_internal_failures: int = 2
    """New attempts after a worker said that it failed."""
    max_fruitless_attempts: int = 8
    """Attempts in a row that were accepted and gave no token."""
    max_unsent_bytes: int = 64 << 20
    """Per worker: beyond it the worker does not read, and is not given more."""

    def __post_init__(self) -> None:
        _positive(
            self,
            "session_timeout_s",
            "admission_timeout_s",
            "placement_timeout_s",
            "silence_timeout_s",
            "retry_after_s",
            "max_fruitless_attempts",
            "max_unsent_bytes",
        )
        for name in ("max_lost_workers", "max_internal_failures"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """One gateway."""

    node: NodeConfig
    models: tuple[ModelSource, ...]
    """Their configs and tokenizers are loaded; weights are not."""
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    """0 takes a free one."""
    grpc_host: str = "127.0.0.1"
    grpc_port: int = 8001
    """0 takes a free one."""
    router: RouterConfig = field(default_factory=RouterConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    keep_alive_s: float = 15.0
    """A comment is sent on a stream that has been silent for so long, so that proxies keep it open."""
    stop_grace_s: float = 2.0
    """How long `stop` waits for requests in work before it ends them with an error."""
    register_timeout_s: float = 30.0
    """How long `start` waits for the control plane."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models must name at least one")
        names = [source.name for source in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models must have different names, got {names}")
        for name in ("http_port", "grpc_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be in 0..65535, got {getattr(self, name)}")
        if self.stop_grace_s < 0:
            raise ValueError(f"stop_grace_s must be >= 0, got {self.stop_grace_s}")
        _positive(self, "keep_alive_s", "register_timeout_s")


def _positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} must be > 0, got {getattr(config, name)}")
