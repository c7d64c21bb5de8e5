"""What happens to each row on its own: embedding, norms, the gated activation, rotary positions.

Each works on rows first..last - 1, the share of one thread. All arrays are flat; see simd.py.
"""

from __future__ import annotations

import numpy as np

from engine.kernels.compiled import kernel
from engine.kernels.simd import LANES, add, div, exp, fma, load, load_one, mul, splat, store, sub, sum_lanes


@kernel
def embed(token_ids, first, last, packed, depth, out, stride):
    """out[row, :depth] = row token_ids[row] of a matrix in panels of 16 rows, `[panel][depth][16]`.

    token_ids: int64. out: float32 [rows, stride]; columns from `depth` on become 0.
    """
    for row in range(first, last):
        start = token_ids[row] // LANES * depth * LANES + token_ids[row] % LANES
        for k in range(depth):
            out[row * stride + k] = load_one(packed, start + k * LANES)
        for k in range(depth, stride):
            out[row * stride + k] = 0.0


@kernel
def rms_norm(x, first, last, stride, size, weights, weights_at, epsilon, out):
    """out = x / sqrt(mean(x²) + epsilon) * weights.

    x, out: float32 [rows, stride]; columns from `size` on hold 0 and stay 0. weights: float32, `stride` of them.
    """
    for row in range(first, last):
        total = splat(np.float32(0))
        for column in range(0, stride, LANES):
            value = load(x, row * stride + column)
            total = fma(value, value, total)
        mean = sum_lanes(total) / np.float32(size)
        scale = splat(np.float32(1) / np.sqrt(mean + np.float32(epsilon)))
        for column in range(0, stride, LANES):
            scaled = mul(load(x, row * stride + column), scale)
            store(out, row * stride + column, mul(scaled, load(weights, weights_at + column)))


@kernel
def gate(x, num_rows, size, first_column, last_column, out):
    """out = silu(gates) * ups, in the columns of one thread.

    x: float32 [num_rows, 2 * size], gates before ups. out: float32 [num_rows, size]. Column bounds are multiples of 16.
    """
    one = splat(np.float32(1))
    zero = splat(np.float32(0))
    for row in range(num_rows):
        for column in range(first_column, last_column, LANES):
            value = load(x, row * 2 * size + column)
            activated = div(value, add(one, exp(sub(zero, value))))
            store(out, row * size + column, mul(activated, load(x, row * 2 * size + size + column)))


@kernel
def norm_heads(x, first, last, stride, column, num_heads, head_dim, weights, weights_at, epsilon):
    """RMSNorm of each head in place: Qwen3's QK-norm.

    x: float32 [rows, stride], heads from `column` on. weights: float32, head_dim of them.
    """
    for row in range(first, last):
        for head in range(num_heads):
            start = row * stride + column + head * head_dim
            total = np.float32(0)
            for i in range(head_dim):
                total += x[start + i] * x[start + i]
            scale = np.float32(1) / np.sqrt(total / np.float32(head_dim) + np.float32(epsilon))
            for i in range(head_dim):
                x[start + i] = x[start + i] * scale * weights[weights_at + i]


@kernel
def rotate(x, first, last, stride, num_heads, head_dim, positions, cosines, sines):
    """Rotary position embedding in place: element i of a head turns against element i + head_dim / 2.

    x: float32 [rows, stride], heads from column 0 on. positions: int64 [rows].
    cosines, sines: float32 [positions, head_dim / 2].
    """
    half = head_dim // 2
    for row in range(first, last):
        table = positions[row] * half
        for head in range(num_heads):
            start = row * stride + head * head_dim
            for i in range(half):
                low = x[start + i]
                high = x[start + half + i]
                x[start + i] = low * cosines[table + i] - high * sines[table + i]
                x[start + half + i] = high * cosines[table + i] + low * sines[table + i]
