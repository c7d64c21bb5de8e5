"""The way in: clients' requests over HTTP and gRPC, placed on the cluster's workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.gateway.config import GatewayConfig, LimitsConfig, PlacementConfig

if TYPE_CHECKING:
    from cluster.gateway.gateway import Gateway

__all__ = ["Gateway", "GatewayConfig", "LimitsConfig", "PlacementConfig"]


def __getattr__(name: str) -> Any:
    """The gateway itself brings web frameworks; who only needs its config should not wait for them."""
    if name == "Gateway":
        from cluster.gateway.gateway import Gateway

        return Gateway
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
