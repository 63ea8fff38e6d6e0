"""Triton kernels of `lora`: two for all adapters that read the same input.

The first makes x down^T. For few tokens it splits the sums into parts, so that more than a handful of programs
have something to do; the second sums the parts as it reads them, and adds what they give to the product.
Factors are read as they are, float32 beside a bf16 model: no rounded copy of them has to be kept up to date.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludus.kernels.device import next_power_of_2

MOST = 3
"""Adapters in one call: queries, keys and values."""
_DEPTH = 64
_CHUNK = 4 * _DEPTH
_ENOUGH = 64
"""Programs from which on sums are not split."""


@triton.jit
def _ready(values, PRECISION: tl.constexpr):
    """Float32 as the matrix units take it: they drop the last 13 bits, so these are rounded off before."""
    values = values.to(tl.float32)
    if PRECISION == "tf32":
        bits = (values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        rounded = bits.to(tl.float32, bitcast=True)
        values = tl.where(values == values, rounded, values)  # a GPU's NaN would become a zero
    return values


@triton.jit
def _inner(
    X, DOWN, PART, tokens, width, ranks, chunk,
    TOKENS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    begin = tl.program_id(2) * chunk
    rows = token.to(tl.int64)[:, None] * width
    acc = tl.zeros((TOKENS, RANKS), tl.float32)
    for start in range(begin, tl.minimum(begin + chunk, width), DEPTH):
        at = start + tl.arange(0, DEPTH)
        inside = (at < width)[None, :]
        x = tl.load(X + rows + at[None, :], mask=(token < tokens)[:, None] & inside, other=0.0)
        down = tl.load(
            DOWN + rank[:, None] * width + at[None, :], mask=(rank < ranks)[:, None] & inside, other=0.0
        )
        acc += tl.dot(x.to(tl.float32), tl.trans(_ready(down, PRECISION)), input_precision=PRECISION)
    place = (tl.program_id(2) * tokens + token).to(tl.int64)[:, None] * ranks + rank[None, :]
    tl.store(PART + place, acc, mask=(token < tokens)[:, None] & (rank < ranks)[None, :])


@triton.jit
def _add(
    OUT, PART, UP, scaling, tokens, parts, total, rank, width0, width1, width2, first0, first1, first2,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    ADAPTERS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    number, row, width, first = 0, 0, width0, first0
    if ADAPTERS > 1:  # whose tile it is
        tiles = tl.cdiv(width0, COLUMNS)
        if tile >= tiles:
            tile -= tiles
            number, row, width, first = 1, width0, width1, first1
            if ADAPTERS > 2:
                tiles = tl.cdiv(width1, COLUMNS)
                if tile >= tiles:
                    tile -= tiles
                    number, row, width, first = 2, width0 + width1, width2, first2
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    real, inside = token < tokens, column < width
    ranks = ADAPTERS * rank
    acc = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in range(0, rank, DEPTH):
        at = start + tl.arange(0, DEPTH)
        known = (at < rank)[None, :]
        own = tl.zeros((TOKENS, DEPTH), tl.float32)
        for part in range(parts):
            place = (part * tokens + token).to(tl.int64)[:, None] * ranks + number * rank + at[None, :]
            own += tl.load(PART + place, mask=real[:, None] & known, other=0.0)
        up = tl.load(
            UP + (row + column)[:, None] * rank + at[None, :], mask=inside[:, None] & known, other=0.0
        )
        acc += tl.dot(_ready(own, PRECISION), tl.trans(_ready(up, PRECISION)), input_precision=PRECISION)
    spot = OUT + token.to(tl.int64)[:, None] * total + (first + column)[None, :]
    mask = real[:, None] & inside[None, :]
    out = tl.load(spot, mask=mask, other=0.0).to(tl.float32) + scaling * acc
    tl.store(spot, out.to(OUT.dtype.element_ty), mask=mask)


def add(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, columns: Sequence[tuple[int, int]], scaling: float
) -> Tensor:
    """See `ludus.kernels.lora.low_rank_add`; `out` and the factors are contiguous."""
    assert out.is_contiguous() and down.is_contiguous() and up.is_contiguous()
    assert len(columns) <= MOST
    (tokens, depth), ranks, rank = x.shape, len(down), up.shape[1]
    x = x.contiguous()
    rows = 16 if tokens <= 128 else 32 if tokens <= 1024 else 64
    wide = min(64, max(16, next_power_of_2(ranks)))
    tiles = (triton.cdiv(tokens, rows), triton.cdiv(ranks, wide))
    parts = 1 if tiles[0] * tiles[1] >= _ENOUGH else min(8, triton.cdiv(depth, _CHUNK))
    chunk = triton.cdiv(triton.cdiv(depth, parts), _DEPTH) * _DEPTH
    inner = torch.empty(parts, tokens, ranks, dtype=torch.float32, device=x.device)
    if not tokens:
        return inner
    # Matrix units take 10 of float32's 23 bits, which is as much as a half-precision input has.
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    _inner[(*tiles, parts)](
        x, down, inner, tokens, depth, ranks, chunk,
        TOKENS=rows, RANKS=wide, DEPTH=_DEPTH, PRECISION=precision, num_warps=4, num_stages=3,
    )  # fmt: skip
    firsts = [first for first, _ in columns] + [0] * (MOST - len(columns))
    widths = [width for _, width in columns] + [0] * (MOST - len(columns))
    places = 64 if rows < 64 else 128
    grid = (tiles[0], sum(triton.cdiv(width, places) for width in widths))
    _add[grid](
        out, inner, up, scaling, tokens, parts, out.shape[1], rank, *widths, *firsts,
        TOKENS=rows, COLUMNS=places, DEPTH=min(32, max(16, next_power_of_2(rank))),
        PRECISION=precision, ADAPTERS=len(columns), num_warps=4, num_stages=2,
    )  # fmt: skip
    return inner
