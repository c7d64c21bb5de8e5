"""The forward pass over pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Segment, make_batch
from engine.config import ModelConfig, load_config
from engine.kernels.attention import TILE
from engine.kernels.decoder import Activations, Pool, forward
from engine.kernels.warm import warm_up
from engine.packing import pack, padded, shape_of
from engine.rotation import Rotation
from engine.source import ModelSource
from engine.team import team_of
from engine.weights import Checkpoint, expected_shapes, open_checkpoint
from kvstore.pages import PageLayout

__all__ = ["Model", "Segment", "load_model"]

NUMERICS_VERSION = 2
"""Raise it with any change that alters a bit of K, V or logits: it is part of the namespace of page keys."""

OPERATIONS_PER_THREAD = 4_000_000
"""A step with less work for each of two threads runs on one: waking the other takes some 50 µs."""


class Model:
    """One model's weights, and the forward pass over one page pool.

    Numeric contract: the K, V and logits of a position depend bitwise on its prefix alone, never on where segments
    begin and end, on which others are in the step, on whether the position was prefilled or decoded, or on the number
    of threads. Runs on as many threads as torch is set to (`torch.set_num_threads`). Not thread-safe: one step at a
    time.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """dtype: torch.bfloat16 or torch.float32, of weight values and pages."""
        self.config = config
        self.dtype_name = str(dtype).removeprefix("torch.")
        """Of weight values and pages."""
        self.numerics_id = f"fma-chain-{self.dtype_name}-tile{TILE}-v{NUMERICS_VERSION}"
        """Two models with the same weights and the same id compute the same bits."""
        self.weights_digest = checkpoint.digest()
        """16 bytes: content of the weights, and the config (RoPE, norms, biases)."""
        self._shape = shape_of(config)
        self._weights = pack(checkpoint, dtype)
        self._operations_per_row = 2 * sum(int(np.prod(shape)) for _, shape in expected_shapes(config))
        self._rotation = Rotation(config)
        self._activations = self._room(0)
        self._num_rows = 0  # that they have room for
        self._pool: Pool | None = None
        warm_up(self.dtype_name)

    def layout(self, page_size: int) -> PageLayout:
        """How pages of `page_size` positions lie."""
        return PageLayout(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=page_size,
            dtype=self.dtype_name,  # type: ignore[arg-type]
        )

    def bind(self, pages: np.ndarray, layout: PageLayout) -> None:
        """From now on K and V live in `pages`, which the model keeps alive.

        pages: uint8 [num_pages, page_bytes], writable and C-contiguous.
        """
        if layout != self.layout(layout.page_size):
            raise ValueError(f"{layout} is not this model's layout")
        if pages.dtype != np.uint8 or pages.ndim != 2 or pages.shape[1] != layout.page_bytes:
            raise ValueError(f"pages must be uint8 [n, {layout.page_bytes}], got {pages.dtype} {pages.shape}")
        if not (pages.flags.c_contiguous and pages.flags.writeable):
            raise ValueError("pages must be C-contiguous and writable")
        value_at = layout.page_size * layout.head_dim
        self._pool = Pool(
            elements=pages.reshape(-1).view(np.uint16 if layout.itemsize == 2 else np.float32),
            page_stride=layout.page_bytes // layout.itemsize,
            head_stride=layout.head_bytes // layout.itemsize,
            layer_stride=2 * value_at,
            value_at=value_at,
            page_size=layout.page_size,
        )

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Computes K and V of every position of every segment, and logits where they are wanted.

        Segments may belong to one request (holes) and may share pages before their start. A position that another
        segment of the same step computes counts as computed.
        Returns float32 [number of segments that want logits, vocab_size], in the order of `segments`.
        Raises ValueError for positions, pages or tokens that do not exist, before anything is written.
        """
        if self._pool is None:
            raise RuntimeError("bind() the page pool first")
        if not segments:
            return torch.empty(0, self.config.vocab_size)
        batch = make_batch(segments, self._pool, self.config, self._rotation)
        num_rows = len(batch.token_ids)
        if num_rows > self._num_rows:
            self._activations, self._num_rows = self._room(num_rows), num_rows
        logits = np.empty((len(batch.logit_rows), padded(self.config.vocab_size)), np.float32)
        arguments = (self._shape, self._weights, self._pool, batch, self._activations, logits.reshape(-1))
        counter = np.zeros(1, np.int64)
        num_threads = torch.get_num_threads()
        num_parts = max(1, min(num_threads, num_rows * self._operations_per_row // OPERATIONS_PER_THREAD))
        team_of(num_threads).run(lambda part: forward(*arguments, counter, part, num_parts), num_parts)
        return torch.from_numpy(logits)[:, : self.config.vocab_size]

    def _room(self, num_rows: int) -> Activations:
        config = self.config
        hidden, inner = padded(config.hidden_size), padded(config.intermediate_size)
        queries = config.num_heads * config.head_dim
        return Activations(
            hidden=np.empty(num_rows * hidden, np.float32),
            normed=np.empty(num_rows * hidden, np.float32),
            qkv=np.empty(num_rows * padded(queries + 2 * config.num_kv_heads * config.head_dim), np.float32),
            attended=np.empty(num_rows * queries, np.float32),
            gates_and_ups=np.empty(num_rows * 2 * inner, np.float32),
            inner=np.empty(num_rows * inner, np.float32),
        )


def load_model(source: ModelSource) -> Model:
    """Reads, packs and digests the weights. Seconds for a small model, most of it dequantising.

    Raises UnsupportedModel or BrokenCheckpoint.
    """
    config = load_config(source)
    return Model(config, open_checkpoint(source, config), getattr(torch, source.dtype))
