"""Causal attention of any rows over pages, in place; one routine for prefill and decode.

A row's result depends only on its own query and on the keys and values up to its position: tiles are cut at absolute
positions, what lies behind a row's position is never summed, and the order of every sum is fixed.

Arrays are flat; see simd.py. `pages` holds the pool as elements of the pages' dtype. A key of kv head h in layer l lies
at `page * page_stride + h * head_stride + layer_at + slot * head_dim`, its value `value_at` elements behind it.
"""

from __future__ import annotations

import numpy as np

from engine.kernels.compiled import kernel
from engine.kernels.product import product
from engine.kernels.simd import (
    LANES,
    add,
    exp,
    keep_first,
    load,
    load_one,
    max_lanes,
    maximum,
    mul,
    splat,
    store,
    store_one,
    sub,
    sum_lanes,
    transpose,
)

TILE = 64
"""Key positions whose scores are taken together; a multiple of 16 and part of the numeric contract."""

QUERY_ROWS = 16
"""Most rows of one segment that share the gathering of a tile. Changes no result."""


@kernel
def store_kv(
    x,
    first,
    last,
    stride,
    key_column,
    value_column,
    num_kv_heads,
    head_dim,
    slots,
    pages,
    head_stride,
    layer_at,
    value_at,
):
    """Writes the keys and values of rows first..last - 1 into their pages, rounded to the pages' dtype.

    x: float32 [rows, stride]. slots: int64 [rows], page * page_stride + slot * head_dim of each row.
    """
    for row in range(first, last):
        for head in range(num_kv_heads):
            target = slots[row] + head * head_stride + layer_at
            key = row * stride + key_column + head * head_dim
            value = row * stride + value_column + head * head_dim
            for i in range(head_dim):
                store_one(pages, target + i, x[key + i])
                store_one(pages, target + value_at + i, x[value + i])


@kernel
def _locate(tables, table, tile, held, pages_stride, page_size, head_dim, origin, places):
    """places[j] = element where the key of position tile + j begins, for j < held; behind that, of some key."""
    j = 0
    while j < held:
        slot = (tile + j) % page_size
        start = origin + tables[table + (tile + j) // page_size] * pages_stride + slot * head_dim
        count = min(page_size - slot, held - j)
        for i in range(count):
            places[j + i] = start + i * head_dim
        j += count
    for i in range(held, TILE):
        places[i] = places[0]


@kernel
def _gather_keys(pages, places, held, head_dim, keys):
    """keys: float32 [TILE / 16, head_dim, 16], transposed so that the lanes of a vector are positions."""
    whole = head_dim // LANES * LANES
    for j in range(0, held, LANES):
        panel = j * head_dim
        for i in range(0, whole, LANES):
            transpose(pages, places, j, i, keys, panel + i * LANES)
        for i in range(whole, head_dim):
            for lane in range(LANES):
                keys[panel + i * LANES + lane] = load_one(pages, places[j + lane] + i)


@kernel
def _gather_values(pages, places, value_at, held, head_dim, dim, values):
    """values: float32 [TILE, dim]; what lies behind head_dim stays as it was."""
    whole = head_dim // LANES * LANES
    for j in range(held):
        source = places[j] + value_at
        for i in range(0, whole, LANES):
            store(values, j * dim + i, load(pages, source + i))
        for i in range(whole, head_dim):
            values[j * dim + i] = load_one(pages, source + i)


@kernel
def _soften(scores, r, visible, highest, weights, sums, dim):
    """Turns the scores of query r into weights, relative to the highest score so far; older sums are rescaled when it
    rises."""
    lowest = np.float32(-np.inf)
    at = r * TILE
    top = splat(lowest)
    for j in range(0, visible, LANES):
        top = maximum(top, keep_first(load(scores, at + j), visible - j, lowest))
    tile_highest = max_lanes(top)
    total = load(weights, r * LANES)
    if tile_highest > highest[r]:
        shrink = exp(splat(highest[r] - tile_highest))
        highest[r] = tile_highest
        total = mul(total, shrink)
        for i in range(0, dim, LANES):
            store(sums, r * dim + i, mul(load(sums, r * dim + i), shrink))
    for j in range(0, visible, LANES):
        weight = exp(sub(load(scores, at + j), splat(highest[r])))
        weight = keep_first(weight, visible - j, np.float32(0))
        store(scores, at + j, weight)
        total = add(total, weight)
    store(weights, r * LANES, total)


@kernel
def make_room(group, head_dim):
    """Working memory of one thread for `attend`."""
    dim = (head_dim + LANES - 1) // LANES * LANES
    most = QUERY_ROWS * group
    return (
        np.empty(TILE, np.int64),  # places
        np.empty(TILE * head_dim, np.float32),  # keys
        np.empty(TILE * dim, np.float32),  # values
        np.empty(most * head_dim, np.float32),  # queries
        np.empty(most * TILE, np.float32),  # scores
        np.empty(most * dim, np.float32),  # sums of weighted values
        np.empty(most * LANES, np.float32),  # sums of weights, by lane
        np.empty(most, np.float32),  # highest scores
        np.zeros(TILE, np.float32),
    )


@kernel
def attend(
    q,
    q_stride,
    out,
    out_stride,
    units,
    tables,
    pages,
    page_stride,
    head_stride,
    layer_at,
    value_at,
    page_size,
    num_kv_heads,
    group,
    head_dim,
    room,
    part,
    parts,
):
    """softmax(q k / sqrt(head_dim)) v over all positions up to each row's own.

    q, out: float32 [rows, stride], heads from column 0 on; query head h reads kv head h // group.
    units: int64 [n, 4] of (first row, number of rows <= QUERY_ROWS, position of the first row, start in `tables`).
    tables: int64, block tables end to end. Computes `part` of `parts` of the (unit, kv head) pairs.
    """
    dim = (head_dim + LANES - 1) // LANES * LANES
    places, keys, values, queries, scores, sums, weights, highest, zeros = room
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    for pair in range(part, len(units) // 4 * num_kv_heads, parts):
        unit = pair // num_kv_heads * 4
        head = pair % num_kv_heads
        first_row, num_rows, first_position, table = units[unit], units[unit + 1], units[unit + 2], units[unit + 3]
        num_queries = num_rows * group
        for r in range(num_queries):  # all heads of the first row, then of the next
            source = (first_row + r // group) * q_stride + (head * group + r % group) * head_dim
            for i in range(head_dim):
                queries[r * head_dim + i] = q[source + i] * scale
        sums[: num_queries * dim] = 0
        weights[: num_queries * LANES] = 0
        highest[:num_queries] = -np.inf
        end = first_position + num_rows
        for tile in range(0, end, TILE):
            held = min(TILE, end - tile)
            origin = head * head_stride + layer_at
            _locate(tables, table, tile, held, page_stride, page_size, head_dim, origin, places)
            _gather_keys(pages, places, held, head_dim, keys)
            _gather_values(pages, places, value_at, held, head_dim, dim, values)
            # Rows before the tile see nothing of it.
            row = max(tile - first_position, 0)
            product(
                *(num_queries - row * group, (held + LANES - 1) // LANES, head_dim),
                *(queries, row * group * head_dim, head_dim),
                *(keys, 0, LANES, head_dim * LANES),
                *(zeros, 0, 0),
                *(scores, row * group * TILE, TILE, False),
            )
            while row < num_rows:
                # Rows that see the whole tile go together; on the diagonal each sees one position more than the one
                # before.
                visible = min(TILE, first_position + row + 1 - tile)
                rows = num_rows - row if visible == TILE else 1
                for r in range(row * group, (row + rows) * group):
                    _soften(scores, r, visible, highest, weights, sums, dim)
                product(
                    *(rows * group, dim // LANES, visible),
                    *(scores, row * group * TILE, TILE),
                    *(values, 0, dim, LANES),
                    *(sums, row * group * dim, dim),
                    *(sums, row * group * dim, dim, False),
                )
                row += rows
        for r in range(num_queries):
            total = sum_lanes(load(weights, r * LANES))
            target = (first_row + r // group) * out_stride + (head * group + r % group) * head_dim
            for i in range(head_dim):
                out[target + i] = sums[r * dim + i] / total
