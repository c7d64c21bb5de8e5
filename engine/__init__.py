"""Running a model on one device group. Names are loaded when they are used: configs and tokenizers need no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import ModelConfig, load_config
    from engine.errors import BrokenChat, BrokenCheckpoint, EngineError, UnsupportedModel
    from engine.model import Model, Segment, load_model
    from engine.sampling import Sampled, SamplingParams, SamplingRow, sample
    from engine.source import ModelSource
    from engine.tokenizer import Detokenizer, Tokenizer, load_tokenizer

_MODULES = {
    "ModelConfig": "config",
    "load_config": "config",
    "BrokenChat": "errors",
    "BrokenCheckpoint": "errors",
    "EngineError": "errors",
    "UnsupportedModel": "errors",
    "Model": "model",
    "Segment": "model",
    "load_model": "model",
    "Sampled": "sampling",
    "SamplingParams": "sampling",
    "SamplingRow": "sampling",
    "sample": "sampling",
    "ModelSource": "source",
    "Detokenizer": "tokenizer",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}

__all__ = [
    "BrokenChat",
    "BrokenCheckpoint",
    "Detokenizer",
    "EngineError",
    "Model",
    "ModelConfig",
    "ModelSource",
    "Sampled",
    "SamplingParams",
    "SamplingRow",
    "Segment",
    "Tokenizer",
    "UnsupportedModel",
    "load_config",
    "load_model",
    "load_tokenizer",
    "sample",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"engine.{_MODULES[name]}"), name)
