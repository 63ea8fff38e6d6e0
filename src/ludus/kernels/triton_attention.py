"""Triton kernels of `attention` over the blocks of a KV cache, which are not Triton's tiles (BLOCK).

Decoding attends with one new token a row. That is too little work to fill a GPU by rows and heads alone, so a
context is split along its length as well ("split-K", Flash-Decoding):

    program (row, key head, part): online softmax over its part of the context, for all query heads of the group
        PART = sum_i exp2(s_i - top) v_i / total        LSE = top + log2(total)
    _join_kernel (row, query head): OUT = sum_p exp2(LSE_p - max LSE) PART_p / sum_p exp2(LSE_p - max LSE)

A part's result is normalised by its own sum, and its LSE (log2 of that sum, the maximum added back) is its
weight among the parts: the merge is exact, whatever the parts' maxima are. Scores are to base 2 throughout:
log2(e) is multiplied in once, because exp2 is the instruction that GPUs have. With one part there is nothing to
merge, and the first kernel writes the result itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludus.kernels.device import next_power_of_2

# Found by trying on an H200, for heads of 64 and 128, 1 to 512 rows and contexts of 512 to 8192 tokens: twice
# as many programs, or other tiles, cost 5 to 40%.
_TILE_ELEMENTS = 8192
"""Size of one round's tile of keys: 128 tokens of a narrow head, 64 of a wide one."""
_LEAST = 256
"""No part of a context is smaller, so that few of them do little."""
_PROGRAMS = 264
"""How many programs fill a large GPU: rows are split until there are about so many."""
_MOST_PARTS = 64
_WARPS, _STAGES = 4, 2


@triton.jit
def squeezed(score, softcap):
    """softcap * tanh(score / softcap)"""
    return softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)


@triton.jit
def absorbed(score, value, top, total, acc):
    """(maximum, sum of weights, weighted values) of a softmax to base 2, after one more tile."""
    higher = tl.maximum(top, tl.max(score, 1))
    # A row that has seen nothing yet: its maximum is minus infinity, and must not make a NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return higher, total, acc


@triton.jit
def _decode_kernel(
    Q, KEYS, VALUES, TABLES, LENGTHS, OUT, PART, LSE, scaling, softcap, window, table_width,
    heads, kv_heads, block_size, size, least,
    GROUP: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(LENGTHS + row)
    begin = tl.maximum(length - window, 0) if HAS_WINDOW else 0
    group = heads // kv_heads
    # The grid has PARTS programs for every row, since lengths are not known on the host. Parts are whole tiles
    # and no smaller than `least`: those behind the end of a short context find nothing to do.
    share = tl.maximum(tl.cdiv(tl.cdiv(length - begin, PARTS), TILE) * TILE, least)
    first = begin + part * share
    last = tl.minimum(first + share, length)
    member = tl.arange(0, GROUP)
    at = tl.arange(0, SIZE)
    head = kv_head * group + member
    real = (member < group)[:, None] & (at < size)[None, :]
    query = tl.load(Q + (row * heads + head)[:, None] * size + at[None, :], mask=real, other=0.0)
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, SIZE), tl.float32)
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < last
        block = tl.load(TABLES + row * table_width + position // block_size, mask=inside, other=0)
        place = (block.to(tl.int64) * kv_heads + kv_head) * block_size + position % block_size
        mask = inside[:, None] & (at < size)[None, :]
        address = place[:, None] * size + at[None, :]
        key = tl.load(KEYS + address, mask=mask, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if HAS_CAP:
            score = squeezed(score, softcap)
        score = tl.where(inside[None, :], score * 1.4426950408889634, float("-inf"))  # log2(e)
        value = tl.load(VALUES + address, mask=mask, other=0.0)
        top, total, acc = absorbed(score, value, top, total, acc)
    safe = tl.where(total > 0, total, 1.0)
    acc = acc / safe[:, None]
    if PARTS == 1:
        place = OUT + (row * heads + head)[:, None] * size + at[None, :]
        tl.store(place, acc.to(OUT.dtype.element_ty), mask=real)
    else:
        # An empty part has a weight of 0 (LSE minus infinity), and the merge does not read its result.
        spot = (row * heads + head) * PARTS + part
        tl.store(
            LSE + spot, tl.where(total > 0, top + tl.log2(safe), float("-inf")), mask=member < group
        )
        if first < last:
            tl.store(PART + spot[:, None] * size + at[None, :], acc, mask=real)


@triton.jit
def _join_kernel(PART, LSE, OUT, size, SIZE: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    part = tl.arange(0, PARTS)
    lse = tl.load(LSE + row * PARTS + part)
    top = tl.max(lse, 0)
    # An idle row has no part with anything in it.
    weight = tl.where(lse == float("-inf"), 0.0, tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top)))
    total = tl.sum(weight, 0)
    mask = (weight > 0)[:, None] & (at < size)[None, :]
    acc = tl.load(PART + (row * PARTS + part)[:, None] * size + at[None, :], mask=mask, other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(OUT + row * size + at, out.to(OUT.dtype.element_ty), mask=at < size)


def parts_for(rows: int, kv_heads: int, capacity: int) -> int:
    """Into how many parts a context is split: a power of two, more for few rows, none too small."""
    wanted = min(-(-_PROGRAMS // (rows * kv_heads)), -(-capacity // _LEAST), _MOST_PARTS)
    return next_power_of_2(max(1, wanted))


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[R, Hq, D] from query [R, Hq, D] and blocks [blocks, Hkv, block_size, D]."""
    rows, heads, size = query.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    out = torch.empty_like(query)
    capacity = tables.shape[1] * block_size
    parts = parts_for(rows, kv_heads, capacity if window is None else min(capacity, window))
    if parts > 1:
        part = torch.empty(rows, heads, parts, size, dtype=torch.float32, device=query.device)
        lse = torch.empty(rows, heads, parts, dtype=torch.float32, device=query.device)
    else:
        part = lse = out
    wide = max(16, next_power_of_2(size))  # matrix units want 16 at least
    tile = max(16, min(128, _TILE_ELEMENTS // wide))
    _decode_kernel[(rows, kv_heads, parts)](
        query, keys, values, tables, lengths, out, part, lse,
        scaling, softcap or 1.0, window or 0, tables.stride(0), heads, kv_heads, block_size, size, _LEAST,
        GROUP=max(16, next_power_of_2(heads // kv_heads)), SIZE=wide, TILE=tile, PARTS=parts,
        HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    if parts > 1:
        _join_kernel[(rows * heads,)](part, lse, out, size, SIZE=wide, PARTS=parts, num_warps=2)
    return out


# Prefill: causal attention of several new tokens a row over its blocks, including the new ones. A program takes
# a tile of (new token, query head) pairs that share one head of keys, so that a short turn on a long context
# reads the context once for all heads of a group. The number of programs follows from the number of tokens and
# rows alone, not from how the tokens are spread over the rows, so that one captured launch serves any spread:
# each program looks up whose tile it has.

_TILE_BYTES = 1 << 14
"""Most bytes of a tile of queries, keys or values: three fit into the smaller GPUs' shared memory."""


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
def _prefill_kernel(
    Q, KEYS, VALUES, TABLES, STARTS, LENGTHS, OUT, scaling, softcap, window, table_width,
    rows, heads, kv_heads, block_size, size,
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
        block = tl.load(
            TABLES + row.to(tl.int64) * table_width + position // block_size, mask=inside, other=0
        )
        place = (block.to(tl.int64) * kv_heads + kv_head) * block_size + position % block_size
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


def prefill(
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
    """[T, Hq, D]; row r's new tokens are starts[r] to starts[r + 1], the last of lengths[r] in its blocks."""
    tokens, heads, size = query.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    out = torch.empty_like(query)
    wide = max(16, next_power_of_2(size))
    element = query.element_size()
    tile = max(16, min(128 // element, _TILE_BYTES // (wide * element)))
    grid = (tokens * (heads // kv_heads) // tile + len(lengths), kv_heads)
    _prefill_kernel[grid](
        query, keys, values, tables, starts, lengths, out,
        scaling, softcap or 1.0, window or 0, tables.stride(0), len(lengths), heads, kv_heads, block_size, size,
        ROWS=tile, SIZE=wide, TILE=tile,
        HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
