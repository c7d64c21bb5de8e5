"""The prefill node: computes prompts and publishes their pages."""

from prefill_node.config import PrefillConfig
from prefill_node.worker import PrefillWorker

__all__ = ["PrefillConfig", "PrefillWorker"]
