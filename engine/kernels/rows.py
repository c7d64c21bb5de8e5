"""What happens to each row on its own: norms, the gated activation, rotary positions. All arrays are flat; see
simd.py."""

from __future__ import annotations

import numpy as np

from engine.kernels.compiled import kernel
from engine.kernels.simd import LANES, add, div, exp, fma, load, mul, splat, store, sub, sum_lanes


@kernel
def rms_norm(x, num_rows, stride, size, weight, epsilon, out):
    """out = x / sqrt(mean(x²) + epsilon) * weight.

    x, out: float32 [num_rows, stride]; columns from `size` on hold 0 and stay 0. weight: float32 [stride].
    """
    for row in range(num_rows):
        total = splat(np.float32(0))
        for column in range(0, stride, LANES):
            value = load(x, row * stride + column)
            total = fma(value, value, total)
        mean = sum_lanes(total) / np.float32(size)
        scale = splat(np.float32(1) / np.sqrt(mean + np.float32(epsilon)))
        for column in range(0, stride, LANES):
            scaled = mul(load(x, row * stride + column), scale)
            store(out, row * stride + column, mul(scaled, load(weight, column)))


@kernel
def gate(x, num_rows, stride, size, out):
    """out = silu(gates) * ups.

    x: float32 [num_rows, stride], gates in the first `size` columns and ups in the next. out: float32 [num_rows, size].
    `size` is a multiple of 16.
    """
    one = splat(np.float32(1))
    zero = splat(np.float32(0))
    for row in range(num_rows):
        for column in range(0, size, LANES):
            value = load(x, row * stride + column)
            activated = div(value, add(one, exp(sub(zero, value))))
            store(out, row * size + column, mul(activated, load(x, row * stride + size + column)))


@kernel
def norm_heads(x, num_rows, stride, num_heads, head_dim, weight, epsilon):
    """RMSNorm of each head in place: Qwen3's QK-norm.

    x: float32 [num_rows, stride], heads from column 0 on. weight: float32 [head_dim].
    """
    for row in range(num_rows):
        for head in range(num_heads):
            start = row * stride + head * head_dim
            total = np.float32(0)
            for i in range(head_dim):
                total += x[start + i] * x[start + i]
            scale = np.float32(1) / np.sqrt(total / np.float32(head_dim) + np.float32(epsilon))
            for i in range(head_dim):
                x[start + i] = x[start + i] * scale * weight[i]


@kernel
def rotate(x, num_rows, stride, num_heads, head_dim, positions, cosines, sines):
    """Rotary position embedding in place: element i of a head turns against element i + head_dim / 2.

    x: float32 [num_rows, stride], heads from column 0 on. positions: int64 [num_rows].
    cosines, sines: float32 [context, head_dim / 2].
    """
    half = head_dim // 2
    for row in range(num_rows):
        table = positions[row] * half
        for head in range(num_heads):
            start = row * stride + head * head_dim
            for i in range(half):
                low = x[start + i]
                high = x[start + half + i]
                x[start + i] = low * cosines[table + i] - high * sines[table + i]
                x[start + half + i] = high * cosines[table + i] + low * sines[table + i]
