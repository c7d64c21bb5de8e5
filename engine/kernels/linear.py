"""Matrix products whose every output element is one chain of fused multiply-adds in the order of the depth.

    out[row, n] = fma(x[row, K-1], w[n, K-1], ... fma(x[row, 0], w[n, 0], bias[n]))

So a row's result depends neither on how many rows there are, nor on tiling, threads, or the width of the CPU's
registers. Weights lie in panels of 16 outputs, `[panel][depth][16]`, bfloat16 or float32. All arrays are flat; see
simd.py.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.compiled import kernel
from engine.kernels.simd import LANES, emit_fma, emit_load, emit_pointer, emit_splat, emit_store, load_one

ROWS_PER_BLOCK = 96
"""Rows that pass a panel before the next panel is read: their inputs stay in L2."""

ROWS_PER_TILE = 6
"""AVX2 has 16 registers: 6 rows x 1 panel take 12 for sums, 2 for weights, 1 for the input."""

_TILES = ((1, 4), (1, 1), (2, 2), (2, 1), (3, 2), (3, 1), (4, 1), (5, 1), (6, 1))
"""Rows x panels whose sums are held in registers over the whole depth. Few rows need several panels: about 8 sums in
flight hide the latency of the multiply-add."""


@intrinsic
def _tile(
    typing: Any,
    num_rows: Any,
    num_panels: Any,
    x: Any,
    x_at: Any,
    x_stride: Any,
    weights: Any,
    weights_at: Any,
    depth: Any,
    bias: Any,
    bias_at: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
    accumulate: Any,
) -> Any:
    """One of _TILES: `out[row, 16 panels..]` of consecutive rows and panels, from the elements `*_at` on."""
    n = types.intp
    signature = types.void(n, n, x, n, n, weights, n, n, bias, n, out, n, n, types.boolean)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for rows, panels in _TILES:
            this = builder.and_(
                builder.icmp_signed("==", args[0], args[0].type(rows)),
                builder.icmp_signed("==", args[1], args[1].type(panels)),
            )
            with builder.if_then(this):
                _emit_tile(context, builder, rows, panels, signature.args[2:], args[2:])
        return context.get_dummy_value()

    return signature, emit


def _emit_tile(context: Any, builder: Any, rows: int, panels: int, arg_types: Any, args: Any) -> None:
    x_type, weights_type, bias_type, out_type = (arg_types[i] for i in (0, 3, 6, 8))
    x, x_at, x_stride, weights, weights_at, depth, bias, bias_at, out, out_at, out_stride, accumulate = args

    def plus(start: Any, stride: Any, times: int) -> Any:
        return builder.add(start, builder.mul(stride, stride.type(times)))

    lanes = depth.type(LANES)
    cells = [(row, panel) for row in range(rows) for panel in range(panels)]
    x_starts = [plus(x_at, x_stride, row) for row in range(rows)]
    weight_starts = [plus(weights_at, builder.mul(depth, lanes), panel) for panel in range(panels)]
    biases = [
        emit_load(builder, emit_pointer(context, builder, bias_type, bias, plus(bias_at, lanes, panel)))
        for panel in range(panels)
    ]
    # LLVM turns these into registers.
    sums = {cell: cgutils.alloca_once_value(builder, biases[cell[1]]) for cell in cells}
    with cgutils.for_range(builder, depth) as loop:
        column_at = builder.mul(loop.index, lanes)
        columns = [
            emit_load(builder, emit_pointer(context, builder, weights_type, weights, builder.add(start, column_at)))
            for start in weight_starts
        ]
        for row in range(rows):
            pointer = emit_pointer(context, builder, x_type, x, builder.add(x_starts[row], loop.index))
            value = emit_splat(builder, builder.load(pointer))
            for panel in range(panels):
                total = sums[row, panel]
                builder.store(emit_fma(builder, value, columns[panel], builder.load(total)), total)
    for cell in cells:
        at = plus(plus(out_at, out_stride, cell[0]), lanes, cell[1])
        target = emit_pointer(context, builder, out_type, out, at)
        total = builder.load(sums[cell])
        before = builder.select(accumulate, emit_load(builder, target), ir.Constant(total.type, [0.0] * LANES))
        emit_store(builder, builder.fadd(before, total), target)


@kernel
def linear(x, x_stride, num_rows, weights, depth, bias, num_panels, out, out_stride, accumulate, part, parts):
    """out = x @ weights.T + bias, or out += that where `accumulate`. Computes the panels of `part` of `parts`.

    x: float32 [num_rows, x_stride], of which the first `depth` columns are read. weights: [num_panels, depth, 16].
    bias: float32 [num_panels * 16]. out: float32 [num_rows, out_stride], the first num_panels * 16 columns are written.
    """
    end_panel = num_panels * (part + 1) // parts
    for block in range(0, num_rows, ROWS_PER_BLOCK):
        block_end = min(block + ROWS_PER_BLOCK, num_rows)
        widest = 1
        if block_end - block == 1:
            widest = 4
        elif block_end - block <= 3:
            widest = 2
        panel = num_panels * part // parts
        while panel < end_panel:
            wide = widest if panel + widest <= end_panel else 1
            row = block
            while row < block_end:
                # Groups of nearly equal size: 8 rows are 4 + 4, not 6 + 2.
                groups = (block_end - row + ROWS_PER_TILE - 1) // ROWS_PER_TILE
                rows = (block_end - row + groups - 1) // groups
                _tile(
                    *(rows, wide),
                    *(x, row * x_stride, x_stride),
                    *(weights, panel * depth * LANES, depth),
                    *(bias, panel * LANES),
                    *(out, row * out_stride + panel * LANES, out_stride, accumulate),
                )
                row += rows
            panel += wide


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
