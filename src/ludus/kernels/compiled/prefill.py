"""Causal attention of several new tokens a row over its pages, the new ones included.

A program takes a tile of (new token, query head) pairs that share one head of keys, so that a short turn on
a long context reads the context once for all heads of a group. How many programs there are follows from the
number of tokens and rows alone, not from how the tokens are spread over the rows, so that one captured launch
serves any spread: each program looks up whose tile it has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludus.kernels.compiled.decode import absorbed, squeezed
from ludus.kernels.support import next_power_of_2

_TILE_BYTES = 1 << 14
"""Of a tile of queries, keys or values at most: three of them fit into the smaller GPUs' shared memory."""


@triton.jit
def _row_of(STARTS, tile, rows, group, ROWS: tl.constexpr):
    """The row that a tile belongs to: row r's first is starts[r] * group // ROWS + r, by bisection."""
    low = 0
    high = rows
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(STARTS + middle) * group // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    Q, KEYS, VALUES, TABLES, STARTS, LENGTHS, OUT, scaling, softcap, window, table_width,
    rows, heads, kv_heads, page_size, size,
    ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    number, kv_head = tl.program_id(0), tl.program_id(1)
    group = heads // kv_heads
    row = _row_of(STARTS, number, rows, group, ROWS)
    begin = tl.load(STARTS + row)
    count = tl.load(STARTS + row + 1) - begin
    tile = number - begin * group // ROWS - row
    if tile * ROWS >= count * group:
        return
    length = tl.load(LENGTHS + row)
    pair = tile * ROWS + tl.arange(0, ROWS)
    token = pair // group
    real = pair < count * group
    own = length - count + token
    at = tl.arange(0, SIZE)
    narrow = (at < size)[None, :]
    spot = (begin + token).to(tl.int64) * heads + kv_head * group + pair % group
    query = tl.load(Q + spot[:, None] * size + at[None, :], mask=real[:, None] & narrow, other=0.0)
    furthest = tl.minimum(length - count + (tile * ROWS + ROWS - 1) // group + 1, length)
    nearest = 0
    if HAS_WINDOW:
        nearest = tl.maximum(length - count + tile * ROWS // group - window + 1, 0) // TILE * TILE
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(nearest, furthest, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < furthest
        page = tl.load(
            TABLES + row.to(tl.int64) * table_width + position // page_size, mask=inside, other=0
        )
        place = (page.to(tl.int64) * kv_heads + kv_head) * page_size + position % page_size
        address = place[:, None] * size + at[None, :]
        mask = inside[:, None] & narrow
        key = tl.load(KEYS + address, mask=mask, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if HAS_CAP:
            score = squeezed(score, softcap)
        seen = (position[None, :] <= own[:, None]) & real[:, None]
        if HAS_WINDOW:
            seen &= position[None, :] > own[:, None] - window
        score = tl.where(seen, score * 1.4426950408889634, float("-inf"))
        value = tl.load(VALUES + address, mask=mask, other=0.0)
        top, total, acc = absorbed(score, value, top, total, acc)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out = OUT + spot[:, None] * size + at[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=real[:, None] & narrow)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[T, Hq, D]; row r's new tokens are starts[r] to starts[r + 1], the last of lengths[r] in its pages."""
    tokens, heads, size = query.shape
    kv_heads, page_size = keys.shape[1], keys.shape[2]
    out = torch.empty_like(query)
    wide = max(16, next_power_of_2(size))
    element = query.element_size()
    tile = max(16, min(128 // element, _TILE_BYTES // (wide * element)))
    grid = (tokens * (heads // kv_heads) // tile + len(lengths), kv_heads)
    _attend[grid](
        query, keys, values, tables, starts, lengths, out,
        scaling, softcap or 1.0, window or 0, tables.stride(0), len(lengths), heads, kv_heads, page_size, size,
        ROWS=tile, SIZE=wide, TILE=tile,
        HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
