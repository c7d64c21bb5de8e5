"""The forward pass of a Llama-like decoder, run by all threads of a team together.

Between two meetings a thread reads what all wrote and writes what no other does: its rows, its columns, or its heads.
Where rows are cut between threads changes no result, since rows, columns and heads are independent bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.kernels.attention import attend, make_room, store_kv
from engine.kernels.compiled import entry, kernel
from engine.kernels.meeting import meet
from engine.kernels.product import product
from engine.kernels.rows import embed, gate, norm_heads, rms_norm, rotate
from engine.kernels.simd import LANES


class Shape(NamedTuple):
    """Sizes of the model. Strides of activations are these, rounded up to multiples of 16."""

    num_layers: int
    hidden_size: int
    inner_size: int
    """Of the MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    qk_norm: bool


class Weights(NamedTuple):
    """Flat arrays, all layers one behind the other. Biases and norms are float32, padded with 0 to multiples of 16.

    Matrices lie in panels of 16 outputs, `[layer][panel][input][16]`, bfloat16 or float32."""

    embedding: np.ndarray
    attention_norm: np.ndarray
    qkv: np.ndarray
    qkv_bias: np.ndarray
    query_norm: np.ndarray
    key_norm: np.ndarray
    output: np.ndarray
    output_bias: np.ndarray
    mlp_norm: np.ndarray
    gate_up: np.ndarray
    """All panels of gates, then all of ups."""
    gate_up_bias: np.ndarray
    down: np.ndarray
    down_bias: np.ndarray
    norm: np.ndarray
    head: np.ndarray
    head_bias: np.ndarray
    """Zeros: no family has one."""


class Pool(NamedTuple):
    """The pages as elements of their dtype, bfloat16 as uint16. Strides count elements; see attention.py."""

    elements: np.ndarray
    page_stride: int
    head_stride: int
    layer_stride: int
    value_at: int
    page_size: int


class Batch(NamedTuple):
    """The rows of one step, one per position. All int64 but the rotary tables, float32 [positions, head_dim / 2]."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    """Where each row's key of head 0 and layer 0 goes: page * page_stride + slot * head_dim."""
    units: np.ndarray
    """See attention.attend."""
    tables: np.ndarray
    """Block tables end to end."""
    logit_rows: np.ndarray
    cosines: np.ndarray
    sines: np.ndarray


class Activations(NamedTuple):
    """Room for the values of one step; float32, a row per row of the batch."""

    hidden: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    attended: np.ndarray
    gates_and_ups: np.ndarray
    inner: np.ndarray


@kernel
def _share(count, part, parts):
    """The part-th of `parts` nearly equal runs of `count` things: first, last + 1."""
    return count * part // parts, count * (part + 1) // parts


@entry
def forward(shape, weights, pool, batch, activations, logits, counter, part, parts):
    """Computes K and V of all rows into the pool, and `logits` of `batch.logit_rows`: float32 [rows, vocabulary
    padded].

    counter: int64 [1], 0, shared by the threads part = 0..parts - 1, which all make this call with the same arguments.
    """
    hidden, normed, qkv, attended, gates_and_ups, inner = activations
    num_rows = len(batch.token_ids)
    first, last = _share(num_rows, part, parts)
    hidden_panels = (shape.hidden_size + LANES - 1) // LANES
    hidden_stride = hidden_panels * LANES
    query_size = shape.num_heads * shape.head_dim
    key_size = shape.num_kv_heads * shape.head_dim
    qkv_panels = (query_size + 2 * key_size + LANES - 1) // LANES
    qkv_stride = qkv_panels * LANES
    inner_panels = (shape.inner_size + LANES - 1) // LANES
    inner_stride = inner_panels * LANES
    # Elements of one panel of weights.
    hidden_panel = shape.hidden_size * LANES
    query_panel = query_size * LANES
    inner_panel = shape.inner_size * LANES
    group = shape.num_heads // shape.num_kv_heads
    room = make_room(group, shape.head_dim)
    expected = 0

    embed(batch.token_ids, first, last, weights.embedding, shape.hidden_size, hidden, hidden_stride)
    for layer in range(shape.num_layers):
        norm_at = layer * hidden_stride
        rms_norm(
            *(hidden, first, last, hidden_stride, shape.hidden_size),
            *(weights.attention_norm, norm_at, shape.norm_epsilon, normed),
        )
        expected += parts
        meet(counter, expected)

        panel, end = _share(qkv_panels, part, parts)
        product(
            *(num_rows, end - panel, shape.hidden_size, normed, 0, hidden_stride),
            *(weights.qkv, (layer * qkv_panels + panel) * hidden_panel, LANES, hidden_panel),
            *(weights.qkv_bias, layer * qkv_stride + panel * LANES, 0),
            *(qkv, panel * LANES, qkv_stride, False),
        )
        expected += parts
        meet(counter, expected)

        if shape.qk_norm:
            head_norm_at = layer * shape.head_dim
            norm_heads(
                *(qkv, first, last, qkv_stride, 0, shape.num_heads, shape.head_dim),
                *(weights.query_norm, head_norm_at, shape.norm_epsilon),
            )
            norm_heads(
                *(qkv, first, last, qkv_stride, query_size, shape.num_kv_heads, shape.head_dim),
                *(weights.key_norm, head_norm_at, shape.norm_epsilon),
            )
        # Keys stand right behind the queries, so both turn as one run of heads.
        rotate(
            *(qkv, first, last, qkv_stride, shape.num_heads + shape.num_kv_heads, shape.head_dim),
            *(batch.positions, batch.cosines, batch.sines),
        )
        layer_at = layer * pool.layer_stride
        store_kv(
            *(qkv, first, last, qkv_stride, query_size, query_size + key_size, shape.num_kv_heads, shape.head_dim),
            *(batch.slots, pool.elements, pool.head_stride, layer_at, pool.value_at),
        )
        expected += parts
        meet(counter, expected)

        attend(
            *(qkv, qkv_stride, attended, query_size, batch.units, batch.tables),
            *(pool.elements, pool.page_stride, pool.head_stride, layer_at, pool.value_at, pool.page_size),
            *(shape.num_kv_heads, group, shape.head_dim, room, part, parts),
        )
        expected += parts
        meet(counter, expected)

        panel, end = _share(hidden_panels, part, parts)
        product(
            *(num_rows, end - panel, query_size, attended, 0, query_size),
            *(weights.output, (layer * hidden_panels + panel) * query_panel, LANES, query_panel),
            *(weights.output_bias, norm_at + panel * LANES, 0),
            *(hidden, panel * LANES, hidden_stride, True),
        )
        expected += parts
        meet(counter, expected)

        rms_norm(
            *(hidden, first, last, hidden_stride, shape.hidden_size),
            *(weights.mlp_norm, norm_at, shape.norm_epsilon, normed),
        )
        expected += parts
        meet(counter, expected)

        panel, end = _share(inner_panels, part, parts)
        for first_panel in (panel, inner_panels + panel):
            product(
                *(num_rows, end - panel, shape.hidden_size, normed, 0, hidden_stride),
                *(weights.gate_up, (layer * 2 * inner_panels + first_panel) * hidden_panel, LANES, hidden_panel),
                *(weights.gate_up_bias, (layer * 2 * inner_panels + first_panel) * LANES, 0),
                *(gates_and_ups, first_panel * LANES, 2 * inner_stride, False),
            )
        gate(gates_and_ups, num_rows, inner_stride, panel * LANES, end * LANES, inner)
        expected += parts
        meet(counter, expected)

        panel, end = _share(hidden_panels, part, parts)
        product(
            *(num_rows, end - panel, shape.inner_size, inner, 0, inner_stride),
            *(weights.down, (layer * hidden_panels + panel) * inner_panel, LANES, inner_panel),
            *(weights.down_bias, norm_at + panel * LANES, 0),
            *(hidden, panel * LANES, hidden_stride, True),
        )
        expected += parts
        meet(counter, expected)

    # Only the rows whose logits are wanted go on, moved to the front of `normed`.
    num_logits = len(batch.logit_rows)
    first, last = _share(num_logits, part, parts)
    for i in range(first, last):
        for column in range(hidden_stride):
            normed[i * hidden_stride + column] = hidden[batch.logit_rows[i] * hidden_stride + column]
    rms_norm(
        *(normed, first, last, hidden_stride, shape.hidden_size, weights.norm, 0, shape.norm_epsilon, normed),
    )
    expected += parts
    meet(counter, expected)
    panels = len(weights.head_bias) // LANES
    panel, end = _share(panels, part, parts)
    product(
        *(num_logits, end - panel, shape.hidden_size, normed, 0, hidden_stride),
        *(weights.head, panel * hidden_panel, LANES, hidden_panel),
        *(weights.head_bias, panel * LANES, 0),
        *(logits, panel * LANES, panels * LANES, False),
    )
