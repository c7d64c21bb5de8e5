"""The spec's models as the engine takes them."""

from __future__ import annotations

import dataclasses

from cluster.spec import ModelShape, ModelSpec
from engine.config import load_config
from engine.source import ModelSource
from kvstore.pages import PageLayout


def model_source(model: ModelSpec) -> ModelSource:
    """Where the engine finds a model of the spec."""
    return ModelSource(
        name=model.name,
        weights=model.weights,
        config=model.config,
        tokenizer=model.tokenizer,
        dtype=model.dtype,
        context_tokens=model.context_tokens,
    )


def model_shape(model: ModelSpec) -> ModelShape:
    """What the model's own files say. Raises ValueError or OSError if they cannot be read."""
    config = load_config(dataclasses.replace(model_source(model), context_tokens=None))
    layout = PageLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=model.page_size,
        dtype=model.dtype,
    )
    return ModelShape(context_tokens=config.context_tokens, page_bytes=layout.page_bytes)
