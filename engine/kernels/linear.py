"""Linear layers, and the embedding. Weights lie in panels of 16 outputs, `[panel][depth][16]`, bfloat16 or float32.

All arrays are flat; see simd.py.
"""

from __future__ import annotations

from engine.kernels.compiled import kernel
from engine.kernels.product import product
from engine.kernels.simd import LANES, load_one

ROWS_PER_BLOCK = 96
"""Rows that pass all panels together: their inputs stay in L2."""


@kernel
def linear(x, x_stride, num_rows, weights, depth, bias, num_panels, out, out_stride, accumulate, part, parts):
    """out = x @ weights.T + bias, or out += that where `accumulate`. Computes the panels of `part` of `parts`.

    x: float32 [num_rows, x_stride], of which the first `depth` columns are read. weights: [num_panels, depth, 16].
    bias: float32 [num_panels * 16]. out: float32 [num_rows, out_stride], the first num_panels * 16 columns are written.
    """
    first = num_panels * part // parts
    end = num_panels * (part + 1) // parts
    for block in range(0, num_rows, ROWS_PER_BLOCK):
        product(
            *(min(ROWS_PER_BLOCK, num_rows - block), end - first, depth),
            *(x, block * x_stride, x_stride),
            *(weights, first * depth * LANES, LANES, depth * LANES),
            *(bias, first * LANES, 0),
            *(out, block * out_stride + first * LANES, out_stride, accumulate),
        )


@kernel
def gather_rows(token_ids, weights, depth, out, out_stride):
    """out[i, :depth] = row token_ids[i] of a packed matrix: the embedding, read out of the LM head's panels.

    token_ids: int64 [n]. weights: [panels, depth, 16]. out: float32 [n, out_stride]; columns from `depth` on become 0.
    """
    for i in range(len(token_ids)):
        start = token_ids[i] // LANES * depth * LANES + token_ids[i] % LANES
        for k in range(depth):
            out[i * out_stride + k] = load_one(weights, start + k * LANES)
        for k in range(depth, out_stride):
            out[i * out_stride + k] = 0.0
