"""Causal attention of any rows over pages, in place; one routine for prefill and decode.

A row's result depends only on its own query and on the keys and values up to its position: tiles are cut at absolute
positions, what lies behind a row's position is never summed, and the order of every sum is fixed.

Arrays are flat; see simd.py. `pages` holds the pool as elements of the pages' dtype. A key of kv head h in layer l lies
at `page * page_stride + h * head_stride + layer_at + slot * head_dim`, its value `value_at` elements behind it.
"""

from __future__ import annotations

import numpy as np

from engine.kernels.compiled import kernel
from engine.kernels.simd import (
    LANES,
    add,
    exp,
    fma,
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
)

TILE = 32
"""Key positions whose scores are taken together; a multiple of 16 and part of the numeric contract."""

QUERY_ROWS = 8
"""Most rows of one segment that share the loads of a tile, so that tile, queries and sums stay in L1. Changes no
result."""


@kernel
def store_kv(
    x, num_rows, stride, key_column, value_column, num_kv_heads, head_dim, slots, pages, head_stride, layer_at, value_at
):
    """Writes the keys and values of all rows into their pages, rounded to the pages' dtype.

    x: float32 [num_rows, stride]. slots: int64 [num_rows], page * page_stride + slot * head_dim of each row.
    """
    for row in range(num_rows):
        for head in range(num_kv_heads):
            target = slots[row] + head * head_stride + layer_at
            key = row * stride + key_column + head * head_dim
            value = row * stride + value_column + head * head_dim
            for i in range(head_dim):
                store_one(pages, target + i, x[key + i])
                store_one(pages, target + value_at + i, x[value + i])


@kernel
def _gather(pages, start, target, target_at, dim, head_dim, count):
    """`count` keys or values from consecutive slots to rows of `dim` float32, zero from head_dim on."""
    whole = head_dim // LANES * LANES
    for j in range(count):
        source = start + j * head_dim
        row = target_at + j * dim
        for i in range(0, whole, LANES):
            store(target, row + i, load(pages, source + i))
        if whole < dim:
            store(target, row + whole, splat(np.float32(0)))
            for i in range(whole, head_dim):
                target[row + i] = load_one(pages, source + i)


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
    part,
    parts,
):
    """softmax(q k / sqrt(head_dim)) v over all positions up to each row's own.

    q, out: float32 [rows, stride], heads from column 0 on; query head h reads kv head h // group.
    units: int64 [n, 4] of (first row, number of rows <= QUERY_ROWS, position of the first row, start in `tables`).
    tables: int64, block tables end to end. Computes `part` of `parts` of the (unit, kv head) pairs.
    """
    dim = (head_dim + LANES - 1) // LANES * LANES
    most = QUERY_ROWS * group
    queries = np.empty(most * dim, np.float32)
    sums = np.empty(most * dim, np.float32)
    weights = np.empty(most * LANES, np.float32)  # sums of exp(score - highest), by lane
    highest = np.empty(most, np.float32)
    keys = np.zeros(TILE * dim, np.float32)
    values = np.zeros(TILE * dim, np.float32)
    scores = np.empty(TILE, np.float32)
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    lowest = np.float32(-np.inf)
    nothing = np.float32(0)
    for pair in range(part, len(units) // 4 * num_kv_heads, parts):
        unit = pair // num_kv_heads * 4
        head = pair % num_kv_heads
        first_row, num_rows, first_position, table = units[unit], units[unit + 1], units[unit + 2], units[unit + 3]
        for row in range(num_rows):
            for g in range(group):
                query = (row * group + g) * dim
                source = (first_row + row) * q_stride + (head * group + g) * head_dim
                for i in range(dim):
                    queries[query + i] = q[source + i] * scale if i < head_dim else nothing
                    sums[query + i] = nothing
                highest[row * group + g] = lowest
                store(weights, (row * group + g) * LANES, splat(nothing))
        end = first_position + num_rows
        for tile in range(0, end, TILE):
            held = min(TILE, end - tile)
            j = 0
            while j < held:
                page = tables[table + (tile + j) // page_size]
                slot = (tile + j) % page_size
                count = min(page_size - slot, held - j)
                start = page * page_stride + head * head_stride + layer_at + slot * head_dim
                _gather(pages, start, keys, j * dim, dim, head_dim, count)
                _gather(pages, start + value_at, values, j * dim, dim, head_dim, count)
                j += count
            for row in range(num_rows):
                visible = min(TILE, first_position + row + 1 - tile)
                if visible <= 0:
                    continue
                for g in range(group):
                    r = row * group + g
                    query = r * dim
                    top = splat(lowest)
                    for j in range(0, visible, LANES):
                        for lane in range(LANES):
                            key = (j + lane) * dim
                            dot = mul(load(queries, query), load(keys, key))
                            for i in range(LANES, dim, LANES):
                                dot = fma(load(queries, query + i), load(keys, key + i), dot)
                            scores[j + lane] = sum_lanes(dot)
                        seen = keep_first(load(scores, j), visible - j, lowest)
                        store(scores, j, seen)
                        top = maximum(top, seen)
                    tile_highest = max_lanes(top)
                    total = load(weights, r * LANES)
                    if tile_highest > highest[r]:
                        shrink = exp(splat(highest[r] - tile_highest))
                        highest[r] = tile_highest
                        total = mul(total, shrink)
                        for i in range(0, dim, LANES):
                            store(sums, query + i, mul(load(sums, query + i), shrink))
                    for j in range(0, visible, LANES):
                        weight = keep_first(exp(sub(load(scores, j), splat(highest[r]))), visible - j, nothing)
                        store(scores, j, weight)
                        total = add(total, weight)
                    store(weights, r * LANES, total)
                    i = 0
                    while i + 4 * LANES <= dim:  # 4 vectors: 8 sums in flight on AVX2 hide the latency
                        a = load(sums, query + i)
                        b = load(sums, query + i + LANES)
                        c = load(sums, query + i + 2 * LANES)
                        d = load(sums, query + i + 3 * LANES)
                        for j in range(visible):
                            weight = splat(load_one(scores, j))
                            value = j * dim + i
                            a = fma(weight, load(values, value), a)
                            b = fma(weight, load(values, value + LANES), b)
                            c = fma(weight, load(values, value + 2 * LANES), c)
                            d = fma(weight, load(values, value + 3 * LANES), d)
                        store(sums, query + i, a)
                        store(sums, query + i + LANES, b)
                        store(sums, query + i + 2 * LANES, c)
                        store(sums, query + i + 3 * LANES, d)
                        i += 4 * LANES
                    while i < dim:
                        a = load(sums, query + i)
                        for j in range(visible):
                            a = fma(splat(load_one(scores, j)), load(values, j * dim + i), a)
                        store(sums, query + i, a)
                        i += LANES
        for row in range(num_rows):
            for g in range(group):
                r = row * group + g
                total_weight = sum_lanes(load(weights, r * LANES))
                target = (first_row + row) * out_stride + (head * group + g) * head_dim
                for i in range(head_dim):
                    out[target + i] = sums[r * dim + i] / total_weight
