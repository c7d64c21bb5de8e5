"""The storage node: keeps pages that left the workers' pools, and lends them."""

from __future__ import annotations

from kvstore.node.config import StorageConfig
from kvstore.node.server import StorageNode
from kvstore.node.store import StoreBounds

__all__ = ["StorageConfig", "StorageNode", "StoreBounds"]
