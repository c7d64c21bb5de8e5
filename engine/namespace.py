"""The namespace of a model's page keys."""

from __future__ import annotations

from engine.model import Model
from kvstore.pages import Namespace
from kvstore.pages.layout import LAYOUT_VERSION


def namespace_of(model: Model, page_size: int) -> bytes:
    """16 bytes: a digest of everything that the values of this model's pages depend on, tenant excepted."""
    layout = model.layout(page_size)
    return Namespace(
        weights_digest=model.weights_digest.hex(),
        adapter_digest="",
        page_size=page_size,
        num_layers=layout.num_layers,
        cache_dtype=layout.dtype,
        layout_version=LAYOUT_VERSION,
        rope=repr(model.config.rope),
        numerics_id=model.numerics_id,
    ).digest()
