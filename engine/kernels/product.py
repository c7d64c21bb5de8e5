"""Small matrix products in registers: what linear layers and attention are made of.

    out[row, n] = fma(x[row, K-1], w[K-1, n], ... fma(x[row, 0], w[0, n], start[row, n]))

Every element is one chain of fused multiply-adds in the order of the depth K, so a row's result depends neither on how
many rows there are, nor on tiling, threads, or the width of the CPU's registers. All arrays are flat; see simd.py.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.compiled import kernel
from engine.kernels.simd import LANES, emit_fma, emit_load, emit_pointer, emit_splat, emit_store

ROWS_PER_TILE = 6
"""AVX2 has 16 registers: 6 rows x 1 panel take 12 for sums, 2 for weights, 1 for the input."""

ROWS_PER_BLOCK = 96
"""Rows that pass all panels together: their inputs stay in L2."""

_TILES = ((1, 4), (1, 1), (2, 2), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1))
"""Rows x panels of 16 columns whose sums are held in registers over the whole depth. One or two rows take several
panels: 8 sums in flight hide the latency of the multiply-add. 3 x 2 would not leave registers for the weights (1.6
times slower)."""


@intrinsic
def _tile(
    typing: Any,
    num_rows: Any,
    num_panels: Any,
    depth: Any,
    x: Any,
    x_at: Any,
    x_stride: Any,
    w: Any,
    w_at: Any,
    w_stride: Any,
    w_panel: Any,
    start: Any,
    start_at: Any,
    start_stride: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
    accumulate: Any,
) -> Any:
    """One of _TILES; see `product` for the arguments."""
    n = types.intp
    signature = types.void(n, n, n, x, n, n, w, n, n, n, start, n, n, out, n, n, types.boolean)

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
    depth, x, x_at, x_stride, w, w_at, w_stride, w_panel, start, start_at, start_stride, out, out_at, out_stride = args[
        :14
    ]
    accumulate = args[14]
    x_type, w_type, start_type, out_type = (arg_types[i] for i in (1, 4, 8, 11))

    def plus(origin: Any, stride: Any, times: int) -> Any:
        return builder.add(origin, builder.mul(stride, stride.type(times)))

    def pointer(array_type: Any, array: Any, origin: Any, stride: Any, cell: tuple[int, int]) -> Any:
        at = plus(plus(origin, stride, cell[0]), depth.type(LANES), cell[1])
        return emit_pointer(context, builder, array_type, array, at)

    cells = [(row, panel) for row in range(rows) for panel in range(panels)]
    # LLVM turns these into registers.
    sums = {}
    for cell in cells:
        first = emit_load(builder, pointer(start_type, start, start_at, start_stride, cell))
        sums[cell] = cgutils.alloca_once_value(builder, first)
    x_starts = [plus(x_at, x_stride, row) for row in range(rows)]
    w_starts = [plus(w_at, w_panel, panel) for panel in range(panels)]
    with cgutils.for_range(builder, depth) as loop:
        w_step = builder.mul(loop.index, w_stride)
        weights = [
            emit_load(builder, emit_pointer(context, builder, w_type, w, builder.add(w_start, w_step)))
            for w_start in w_starts
        ]
        for row in range(rows):
            x_pointer = emit_pointer(context, builder, x_type, x, builder.add(x_starts[row], loop.index))
            value = emit_splat(builder, builder.load(x_pointer))
            for panel in range(panels):
                total = sums[row, panel]
                builder.store(emit_fma(builder, value, weights[panel], builder.load(total)), total)
    for cell in cells:
        target = pointer(out_type, out, out_at, out_stride, cell)
        total = builder.load(sums[cell])
        with builder.if_else(accumulate) as (added, plain):
            with added:
                emit_store(builder, builder.fadd(emit_load(builder, target), total), target)
            with plain:
                emit_store(builder, total, target)


@kernel
def product(
    num_rows,
    num_panels,
    depth,
    x,
    x_at,
    x_stride,
    w,
    w_at,
    w_stride,
    w_panel,
    start,
    start_at,
    start_stride,
    out,
    out_at,
    out_stride,
    accumulate,
):
    """out = start + x @ w, or out += that where `accumulate`.

    x: float32 [num_rows, depth]. w: bfloat16 or float32 [num_panels, depth, 16]. start, out: float32 [num_rows,
    num_panels * 16]. Each begins at element `*_at` of its array; its next row lies `*_stride` elements on, w's next
    panel `w_panel`. A start with stride 0 is one row for all.
    """
    for block in range(0, num_rows, ROWS_PER_BLOCK):
        block_end = min(block + ROWS_PER_BLOCK, num_rows)
        widest = 1
        if block_end - block == 1:
            widest = 4
        elif block_end - block == 2:
            widest = 2
        panel = 0
        while panel < num_panels:
            panels = widest if panel + widest <= num_panels else 1
            row = block
            while row < block_end:
                # Groups of nearly equal size: 8 rows are 4 + 4, not 6 + 2.
                groups = (block_end - row + ROWS_PER_TILE - 1) // ROWS_PER_TILE
                rows = (block_end - row + groups - 1) // groups
                _tile(
                    *(rows, panels, depth),
                    *(x, x_at + row * x_stride, x_stride),
                    *(w, w_at + panel * w_panel, w_stride, w_panel),
                    *(start, start_at + row * start_stride + panel * LANES, start_stride),
                    *(out, out_at + row * out_stride + panel * LANES, out_stride, accumulate),
                )
                row += rows
            panel += panels
