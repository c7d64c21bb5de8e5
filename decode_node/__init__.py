"""The decode node: pulls a prompt's pages and generates."""

from decode_node.config import DecodeConfig
from decode_node.worker import DecodeWorker

__all__ = ["DecodeConfig", "DecodeWorker"]
