"""The forward pass over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import ModelConfig, load_config
from engine.kernels import attention, rows
from engine.linear import Linear, padded
from engine.source import ModelSource
from engine.weights import Checkpoint, open_checkpoint
from kvstore.pages import PageLayout

NUMERICS_VERSION = 2
"""Raise it with any change that alters a bit of K, V or logits: it is part of the namespace of page keys."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive positions of one request in one step."""

    token_ids: Sequence[int]
    """At least one."""
    start: int
    """Absolute position of the first token."""
    block_table: Sequence[int]
    """Page ids that cover start + len(token_ids) positions. What lies before `start` must have been computed."""
    wants_logits: bool
    """Of the last position."""


class Model:
    """One model's weights, and the forward pass over one page pool.

    Numeric contract: the K, V and logits of a position depend bitwise on its prefix alone, never on where segments
    begin and end, on which others are in the step, or on whether the position was prefilled or decoded. Not
    thread-safe: one step at a time.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """dtype: torch.bfloat16 or torch.float32, of weight values and pages."""
        self.config = config
        self.dtype = dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.numerics_id = f"fma-chain-{self.dtype_name}-tile{attention.TILE}-v{NUMERICS_VERSION}"
        """Two models with the same weights and the same id compute the same bits."""
        self.weights_digest = checkpoint.digest()
        """16 bytes: content of the weights, and the config (RoPE, norms, biases)."""
        self._layers = [_Layer(config, checkpoint, dtype, index) for index in range(config.num_layers)]
        self._norm = _padded_weight(checkpoint.tensor("model.norm.weight"))
        self._embedding = Linear(checkpoint.tensor("model.embed_tokens.weight"), None, dtype)
        self._head = self._embedding
        if not config.tied_embeddings:
            self._head = Linear(checkpoint.tensor("lm_head.weight"), None, dtype)
        self._rotation = _Rotation(config)
        self._pool: _Pool | None = None

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
        """From now on K and V live in `pages`: uint8 [num_pages, page_bytes], writable, C-contiguous, kept alive by the
        model."""
        if layout != self.layout(layout.page_size):
            raise ValueError(f"{layout} is not this model's layout")
        if pages.dtype != np.uint8 or pages.ndim != 2 or pages.shape[1] != layout.page_bytes:
            raise ValueError(f"pages must be uint8 [n, {layout.page_bytes}], got {pages.dtype} {pages.shape}")
        if not (pages.flags.c_contiguous and pages.flags.writeable):
            raise ValueError("pages must be C-contiguous and writable")
        self._pool = _Pool(pages, layout)

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Computes K and V of every position of every segment, and logits where they are wanted.

        Segments may belong to one request (holes) and may share pages before their start. A position that another
        segment of the same step computes counts as computed.
        Returns float32 [number of segments that want logits, vocab_size], in the order of `segments`.
        """
        if self._pool is None:
            raise RuntimeError("bind() the page pool first")
        step = _Step(segments, self._pool, self.config)
        if not len(step.token_ids):
            return torch.empty(0, self.config.vocab_size)
        self._rotation.reach(int(step.positions.max()) + 1)
        hidden = self._embedding.rows(step.token_ids)
        for index, layer in enumerate(self._layers):
            layer(hidden, step, self._pool, index, self._rotation)
        last = np.ascontiguousarray(hidden[step.logit_rows])
        logits = self._head(_normed(last, self._norm, self.config))
        return torch.from_numpy(logits)[:, : self.config.vocab_size]


class _Pool:
    """The pages as elements, and where things lie in them. Strides count elements."""

    def __init__(self, pages: np.ndarray, layout: PageLayout) -> None:
        self.elements = pages.reshape(-1).view(np.uint16 if layout.itemsize == 2 else np.float32)
        self.page_size = layout.page_size
        self.num_pages = len(pages)
        self.page_stride = layout.page_bytes // layout.itemsize
        self.head_stride = layout.head_bytes // layout.itemsize
        self.value_at = layout.page_size * layout.head_dim
        self.layer_stride = 2 * self.value_at


class _Step:
    """The rows of one forward pass, one per position."""

    def __init__(self, segments: Sequence[Segment], pool: _Pool, config: ModelConfig) -> None:
        token_ids: list[int] = []
        units: list[tuple[int, int, int, int]] = []
        tables: list[int] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        logit_rows: list[int] = []
        for segment in segments:
            count = len(segment.token_ids)
            end = segment.start + count
            if count < 1 or segment.start < 0 or end > config.context_tokens:
                raise ValueError(
                    f"a segment of {count} positions from {segment.start} on; context {config.context_tokens}"
                )
            num_pages = -(-end // pool.page_size)
            if num_pages > len(segment.block_table):
                raise ValueError(f"{len(segment.block_table)} pages for {end} positions")
            pages = np.asarray(segment.block_table[:num_pages], np.int64)
            if pages.min() < 0 or pages.max() >= pool.num_pages:
                raise ValueError(f"block table {segment.block_table} leaves the pool of {pool.num_pages} pages")
            for at in range(0, count, attention.QUERY_ROWS):
                num_rows = min(attention.QUERY_ROWS, count - at)
                units.append((len(token_ids) + at, num_rows, segment.start + at, len(tables)))
            where = np.arange(segment.start, end)
            positions.append(where)
            slots.append(pages[where // pool.page_size] * pool.page_stride + where % pool.page_size * config.head_dim)
            tables.extend(pages)
            token_ids.extend(segment.token_ids)
            if segment.wants_logits:
                logit_rows.append(len(token_ids) - 1)
        self.token_ids = np.asarray(token_ids, np.int64)
        if len(token_ids) and (self.token_ids.min() < 0 or self.token_ids.max() >= config.vocab_size):
            raise ValueError(f"token ids must lie in [0, {config.vocab_size})")
        self.units = np.asarray(units, np.int64).reshape(-1)
        self.tables = np.asarray(tables, np.int64)
        self.positions = np.concatenate(positions) if positions else np.empty(0, np.int64)
        self.slots = np.concatenate(slots) if slots else np.empty(0, np.int64)
        self.logit_rows = np.asarray(logit_rows, np.int64)


class _Rotation:
    """Cosines and sines of the rotary embedding, float32 [positions, head_dim / 2], grown as far as positions have
    come."""

    def __init__(self, config: ModelConfig) -> None:
        self._inverse = config.rope.inverse_frequencies(config.head_dim)
        self._limit = config.context_tokens
        self.cosines = self.sines = np.empty(0, np.float32)
        self._num_positions = 0

    def reach(self, num_positions: int) -> None:
        """Make the tables cover positions below `num_positions`."""
        if num_positions <= self._num_positions:
            return
        self._num_positions = min(max(num_positions, 2 * self._num_positions, 1024), self._limit)
        # The angle is float32, as models were trained; its cosine is taken in double and rounded once.
        angles = np.arange(self._num_positions, dtype=np.float32)[:, None] * self._inverse
        self.cosines = np.cos(angles.astype(np.float64)).astype(np.float32).reshape(-1)
        self.sines = np.sin(angles.astype(np.float64)).astype(np.float32).reshape(-1)


class _Layer:
    """One decoder layer: attention, then the gated MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, index: int) -> None:
        prefix = f"model.layers.{index}"

        def linear(*names: str, bias: bool) -> Linear:
            weights = torch.cat([checkpoint.tensor(f"{prefix}.{name}.weight") for name in names])
            biases = torch.cat([checkpoint.tensor(f"{prefix}.{name}.bias") for name in names]) if bias else None
            return Linear(weights, biases, dtype)

        self._config = config
        self._attention_norm = _padded_weight(checkpoint.tensor(f"{prefix}.input_layernorm.weight"))
        self._qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias)
        self._head_norms: tuple[np.ndarray, np.ndarray] | None = None
        if config.qk_norm:
            query_norm = checkpoint.tensor(f"{prefix}.self_attn.q_norm.weight").numpy()
            self._head_norms = query_norm, checkpoint.tensor(f"{prefix}.self_attn.k_norm.weight").numpy()
        self._output = linear("self_attn.o_proj", bias=config.output_bias)
        self._mlp_norm = _padded_weight(checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight"))
        self._gate_up = _gate_up(checkpoint, prefix, config, dtype)
        self._down = linear("mlp.down_proj", bias=config.mlp_bias)

    def __call__(self, hidden: np.ndarray, step: _Step, pool: _Pool, index: int, rotation: _Rotation) -> None:
        """hidden: float32 [rows, padded(hidden_size)], changed in place."""
        attended = self._attend(_normed(hidden, self._attention_norm, self._config), step, pool, index, rotation)
        self._output(attended, out=hidden)
        gates_and_ups = self._gate_up(_normed(hidden, self._mlp_norm, self._config))
        inner = np.empty((len(hidden), gates_and_ups.shape[1] // 2), np.float32)
        rows.gate(gates_and_ups.reshape(-1), len(hidden), gates_and_ups.shape[1], inner.shape[1], inner.reshape(-1))
        self._down(inner, out=hidden)

    def _attend(self, x: np.ndarray, step: _Step, pool: _Pool, index: int, rotation: _Rotation) -> np.ndarray:
        config = self._config
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = self._qkv(x)
        stride, flat = qkv.shape[1], qkv.reshape(-1)
        keys_at, values_at = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
        if self._head_norms is not None:
            query_norm, key_norm = self._head_norms
            rows.norm_heads(flat, len(qkv), stride, num_heads, head_dim, query_norm, config.norm_epsilon)
            rows.norm_heads(flat[keys_at:], len(qkv), stride, num_kv_heads, head_dim, key_norm, config.norm_epsilon)
        # Keys stand right behind the queries, so both are rotated as one run of heads.
        rows.rotate(
            *(flat, len(qkv), stride, num_heads + num_kv_heads, head_dim),
            *(step.positions, rotation.cosines, rotation.sines),
        )
        where = (pool.head_stride, index * pool.layer_stride, pool.value_at)
        attention.store_kv(
            flat, len(qkv), stride, keys_at, values_at, num_kv_heads, head_dim, step.slots, pool.elements, *where
        )
        out = np.empty((len(qkv), padded(num_heads * head_dim)), np.float32)
        attention.attend(
            *(flat, stride, out.reshape(-1), out.shape[1], step.units, step.tables),
            *(pool.elements, pool.page_stride, *where, pool.page_size),
            *(num_kv_heads, num_heads // num_kv_heads, head_dim, 0, 1),
        )
        return out


def _gate_up(checkpoint: Checkpoint, prefix: str, config: ModelConfig, dtype: torch.dtype) -> Linear:
    """Gates then ups, each padded to a multiple of 16, which the activation kernel needs."""
    extra = padded(config.intermediate_size) - config.intermediate_size
    names = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]
    weights = [torch.nn.functional.pad(checkpoint.tensor(f"{name}.weight"), (0, 0, 0, extra)) for name in names]
    if not config.mlp_bias:
        return Linear(torch.cat(weights), None, dtype)
    biases = [torch.nn.functional.pad(checkpoint.tensor(f"{name}.bias"), (0, extra)) for name in names]
    return Linear(torch.cat(weights), torch.cat(biases), dtype)


def _normed(x: np.ndarray, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    out = np.empty_like(x)
    rows.rms_norm(x.reshape(-1), len(x), x.shape[1], config.hidden_size, weight, config.norm_epsilon, out.reshape(-1))
    return out


def _padded_weight(weight: torch.Tensor) -> np.ndarray:
    out = np.zeros(padded(len(weight)), np.float32)
    out[: len(weight)] = weight.numpy()
    return out


def load_model(source: ModelSource) -> Model:
    """Reads, packs and digests the weights. Seconds for a small model, most of it dequantising.

    Raises UnsupportedModel or BrokenCheckpoint.
    """
    config = load_config(source)
    return Model(config, open_checkpoint(source, config), getattr(torch, source.dtype))
