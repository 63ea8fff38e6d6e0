"""Triton kernels of `layers`: RMS norm with the residual add, SwiGLU gate, rotary positions, LoRA.

LoRA has two kernels for all adapters that read the same input. The first makes x down^T. For few tokens it
splits the sums into parts, so that more than a handful of programs have something to do; the second sums the
parts as it reads them, and adds what they give to the product. Factors are read as they are, float32 beside a
bf16 model: no rounded copy of them has to be kept up to date.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludus.kernels.device import next_power_of_2

# Programs that share the rows of a backward pass: each keeps its own sum for the weight's gradient.
_BACKWARD_PROGRAMS = 528

_BLOCK = 1024
MOST = 3
"""Adapters in one call: queries, keys and values."""
_DEPTH = 64
_CHUNK = 4 * _DEPTH
_ENOUGH = 64
"""Programs from which on sums are not split."""


@triton.jit
def _rms_norm_forward(X, RES, W, OUT, SUM, RSTD, width, eps, HAS_RES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RES:
        x += tl.load(RES + row * width + at, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded before it is normed, as two separate operations would do.
        rounded = x.to(SUM.dtype.element_ty)
        tl.store(SUM + row * width + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x) / width + eps)
    tl.store(RSTD + row, rstd)
    weight = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    normed = (x * rstd).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row * width + at, (normed * weight).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    GRAD, GRAD_SUM, X, W, RSTD, DX, DW, NORMED, rows, width,
    HAS_SUM: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(first, rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + number
        x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + row * width + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        unit = x * rstd
        total += grad * unit
        weighted = grad * weight
        dx = (weighted - unit * (tl.sum(weighted * unit) / width)) * rstd
        if HAS_SUM:
            dx += tl.load(GRAD_SUM + row * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + row * width + at, dx.to(DX.dtype.element_ty), mask=inside)
        if AGAIN:
            kind = NORMED.dtype.element_ty
            normed = unit.to(kind).to(tl.float32) * weight
            tl.store(NORMED + row * width + at, normed.to(kind), mask=inside)
    tl.store(DW + first * width + at, total, mask=inside)


def rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, sum, rstd) of contiguous [T, D]; the sum is `x` itself without a residual."""
    rows, width = x.shape
    out = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else x
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = next_power_of_2(width)
    if rows:
        _rms_norm_forward[(rows,)](
            x,
            residual if residual is not None else x,
            weight,
            out,
            total,
            rstd,
            width,
            eps,
            HAS_RES=residual is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out, total, rstd


def rms_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx, dweight); `grad_sum` is what reaches the sum by other ways and is added to dx.

    With `normed`, what `forward` gave is written into it once more.
    """
    rows, width = x.shape
    dx = torch.empty_like(x)
    programs = max(1, min(rows, _BACKWARD_PROGRAMS))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = next_power_of_2(width)
    _rms_norm_backward[(programs,)](
        grad,
        grad_sum if grad_sum is not None else grad,
        x,
        weight,
        rstd,
        dx,
        partial,
        normed if normed is not None else dx,
        rows,
        width,
        HAS_SUM=grad_sum is not None,
        AGAIN=normed is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return dx, partial.sum(0).to(weight.dtype)


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))


# SwiGLU: silu(gate) * up over rows that hold both halves.


@triton.jit
def _silu_mul_forward(BOTH, OUT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(BOTH + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(BOTH + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded in between, as two separate operations would do.
    opened = (gate * tl.sigmoid(gate)).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row * width + at, (opened * up).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_backward(GRAD, BOTH, DBOTH, PRODUCT, width, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(BOTH + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(BOTH + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + row * width + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    dup = grad * gate * share
    dgate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(DBOTH + row * 2 * width + at, dgate.to(DBOTH.dtype.element_ty), mask=inside)
    tl.store(DBOTH + row * 2 * width + width + at, dup.to(DBOTH.dtype.element_ty), mask=inside)
    if AGAIN:
        opened = (gate * share).to(PRODUCT.dtype.element_ty).to(tl.float32)
        tl.store(PRODUCT + row * width + at, (opened * up).to(PRODUCT.dtype.element_ty), mask=inside)


def silu_mul_forward(both: Tensor) -> Tensor:
    """[T, I] from contiguous [T, 2 I]."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    if rows:
        _silu_mul_forward[(rows, triton.cdiv(width, _BLOCK))](
            both, out, width, BLOCK=_BLOCK, num_warps=4
        )
    return out


def silu_mul_backward(grad: Tensor, both: Tensor, product: Tensor | None = None) -> Tensor:
    """The gradient of both halves; with `product`, what `forward` gave is written into it once more."""
    rows, width = grad.shape
    result = torch.empty_like(both)
    if rows:
        _silu_mul_backward[(rows, triton.cdiv(width, _BLOCK))](
            grad,
            both,
            result,
            product if product is not None else grad,
            width,
            AGAIN=product is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return result


# Rotary positions on stacked query, key and value rows [T, (Hq + 2 Hkv) D]. Halves are rotated against each
# other, (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), as in Llama.


@triton.jit
def _turned(base, cos, sin, head, half, HALF: tl.constexpr, is_real):
    """The two halves of some heads, rotated, in float32; `base` points at a row's first head."""
    at = tl.arange(0, HALF)
    place = head[:, None] * (2 * half) + at[None, :]
    mask = is_real[:, None] & (at < half)[None, :]
    first = tl.load(base + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(base + place + half, mask=mask, other=0.0).to(tl.float32)
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def _rotary_split(
    QKV, COS, SIN, Q, K, V, half, heads, kv_heads,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Joint rows to rotated query and key, and value; or, backward, gradients back to joint rows."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF)
    narrow = at < half
    cos = tl.load(COS + row * 2 * half + at, mask=narrow, other=0.0).to(tl.float32)
    sin = tl.load(SIN + row * 2 * half + at, mask=narrow, other=0.0).to(tl.float32)
    size = 2 * half
    joint = QKV + row * (heads + 2 * kv_heads) * size
    query, key, value = Q + row * heads * size, K + row * kv_heads * size, V + row * kv_heads * size
    head = tl.arange(0, HEADS)
    kv_head = tl.arange(0, KV_HEADS)
    place = head[:, None] * size + at[None, :]
    mask = (head < heads)[:, None] & narrow[None, :]
    kv_place = kv_head[:, None] * size + at[None, :]
    kv_mask = (kv_head < kv_heads)[:, None] & narrow[None, :]
    joint_key = joint + heads * size
    joint_value = joint_key + kv_heads * size
    kind = QKV.dtype.element_ty
    if BACKWARD:
        first, second = _turned(query, cos, -sin, head, half, HALF, head < heads)
        tl.store(joint + place, first.to(kind), mask=mask)
        tl.store(joint + place + half, second.to(kind), mask=mask)
        first, second = _turned(key, cos, -sin, kv_head, half, HALF, kv_head < kv_heads)
        tl.store(joint_key + kv_place, first.to(kind), mask=kv_mask)
        tl.store(joint_key + kv_place + half, second.to(kind), mask=kv_mask)
        tl.store(joint_value + kv_place, tl.load(value + kv_place, mask=kv_mask), mask=kv_mask)
        tl.store(
            joint_value + kv_place + half, tl.load(value + kv_place + half, mask=kv_mask), mask=kv_mask
        )
    else:
        first, second = _turned(joint, cos, sin, head, half, HALF, head < heads)
        tl.store(query + place, first.to(kind), mask=mask)
        tl.store(query + place + half, second.to(kind), mask=mask)
        first, second = _turned(joint_key, cos, sin, kv_head, half, HALF, kv_head < kv_heads)
        tl.store(key + kv_place, first.to(kind), mask=kv_mask)
        tl.store(key + kv_place + half, second.to(kind), mask=kv_mask)
        tl.store(value + kv_place, tl.load(joint_value + kv_place, mask=kv_mask), mask=kv_mask)
        tl.store(
            value + kv_place + half, tl.load(joint_value + kv_place + half, mask=kv_mask), mask=kv_mask
        )


@triton.jit
def _rotary_store(
    QKV, COS, SIN, Q, KEYS, VALUES, SLOTS, half, heads, kv_heads, block_size,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Joint rows to a rotated query, with key and value written to their slots in the blocks."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF)
    narrow = at < half
    cos = tl.load(COS + row * 2 * half + at, mask=narrow, other=0.0).to(tl.float32)
    sin = tl.load(SIN + row * 2 * half + at, mask=narrow, other=0.0).to(tl.float32)
    size = 2 * half
    joint = QKV + row * (heads + 2 * kv_heads) * size
    head = tl.arange(0, HEADS)
    kind = Q.dtype.element_ty
    first, second = _turned(joint, cos, sin, head, half, HALF, head < heads)
    place = Q + row * heads * size + head[:, None] * size + at[None, :]
    mask = (head < heads)[:, None] & narrow[None, :]
    tl.store(place, first.to(kind), mask=mask)
    tl.store(place + half, second.to(kind), mask=mask)
    slot = tl.load(SLOTS + row).to(tl.int64)
    kv_head = tl.arange(0, KV_HEADS)
    joint_key = joint + heads * size
    low, high = _turned(joint_key, cos, sin, kv_head, half, HALF, kv_head < kv_heads)
    block, offset = slot // block_size, slot % block_size
    target = ((block * kv_heads + kv_head) * block_size + offset)[:, None] * size + at[None, :]
    kv_mask = (kv_head < kv_heads)[:, None] & narrow[None, :]
    tl.store(KEYS + target, low.to(kind), mask=kv_mask)
    tl.store(KEYS + target + half, high.to(kind), mask=kv_mask)
    source = joint_key + kv_heads * size + kv_head[:, None] * size + at[None, :]
    tl.store(VALUES + target, tl.load(source, mask=kv_mask), mask=kv_mask)
    tl.store(VALUES + target + half, tl.load(source + half, mask=kv_mask), mask=kv_mask)


def _sizes(heads: int, kv_heads: int, half: int) -> dict[str, int]:
    return {
        "HEADS": next_power_of_2(heads),
        "KV_HEADS": next_power_of_2(kv_heads),
        "HALF": next_power_of_2(half),
    }


def rotary_split(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated query [T, Hq, D] and key [T, Hkv, D], and value."""
    rows, size = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
    query = qkv.new_empty(rows, heads, size)
    key, value = qkv.new_empty(rows, kv_heads, size), qkv.new_empty(rows, kv_heads, size)
    half = size // 2
    if rows:
        _rotary_split[(rows,)](
            qkv, cos, sin, query, key, value, half, heads, kv_heads,
            **_sizes(heads, kv_heads, half), BACKWARD=False, num_warps=4,
        )  # fmt: skip
    return query, key, value


def rotary_join(dquery: Tensor, dkey: Tensor, dvalue: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the joint rows."""
    rows, heads, size = dquery.shape
    kv_heads, half = dkey.shape[1], size // 2
    result = dquery.new_empty(rows, (heads + 2 * kv_heads) * size)
    if rows:
        _rotary_split[(rows,)](
            result, cos, sin, dquery, dkey, dvalue, half, heads, kv_heads,
            **_sizes(heads, kv_heads, half), BACKWARD=True, num_warps=4,
        )  # fmt: skip
    return result


def rotary_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor, heads: int
) -> Tensor:
    """The rotated query; key and value go to `slots` of blocks [blocks, Hkv, block_size, D]."""
    _, kv_heads, block_size, size = keys.shape
    query = qkv.new_empty(qkv.shape[0], heads, size)
    if len(qkv):
        _rotary_store[(len(qkv),)](
            qkv, cos, sin, query, keys, values, slots, size // 2, heads, kv_heads, block_size,
            **_sizes(heads, kv_heads, size // 2), num_warps=4,
        )  # fmt: skip
    return query


# LoRA


@triton.jit
def _lora_ready(values, PRECISION: tl.constexpr):
    """Float32 as the matrix units take it: they drop the last 13 bits, so these are rounded off before."""
    values = values.to(tl.float32)
    if PRECISION == "tf32":
        bits = (values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        rounded = bits.to(tl.float32, bitcast=True)
        values = tl.where(values == values, rounded, values)  # a GPU's NaN would become a zero
    return values


@triton.jit
def _lora_inner(
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
        acc += tl.dot(
            x.to(tl.float32), tl.trans(_lora_ready(down, PRECISION)), input_precision=PRECISION
        )
    place = (tl.program_id(2) * tokens + token).to(tl.int64)[:, None] * ranks + rank[None, :]
    tl.store(PART + place, acc, mask=(token < tokens)[:, None] & (rank < ranks)[None, :])


@triton.jit
def _lora_add(
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
        acc += tl.dot(
            _lora_ready(own, PRECISION), tl.trans(_lora_ready(up, PRECISION)), input_precision=PRECISION
        )
    spot = OUT + token.to(tl.int64)[:, None] * total + (first + column)[None, :]
    mask = real[:, None] & inside[None, :]
    out = tl.load(spot, mask=mask, other=0.0).to(tl.float32) + scaling * acc
    tl.store(spot, out.to(OUT.dtype.element_ty), mask=mask)


def low_rank_add(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, columns: Sequence[tuple[int, int]], scaling: float
) -> Tensor:
    """See `ludus.kernels.layers.low_rank_add`; `out` and the factors are contiguous."""
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
    _lora_inner[(*tiles, parts)](
        x, down, inner, tokens, depth, ranks, chunk,
        TOKENS=rows, RANKS=wide, DEPTH=_DEPTH, PRECISION=precision, num_warps=4, num_stages=3,
    )  # fmt: skip
    firsts = [first for first, _ in columns] + [0] * (MOST - len(columns))
    widths = [width for _, width in columns] + [0] * (MOST - len(columns))
    places = 64 if rows < 64 else 128
    grid = (tiles[0], sum(triton.cdiv(width, places) for width in widths))
    _lora_add[grid](
        out, inner, up, scaling, tokens, parts, out.shape[1], rank, *widths, *firsts,
        TOKENS=rows, COLUMNS=places, DEPTH=min(32, max(16, next_power_of_2(rank))),
        PRECISION=precision, ADAPTERS=len(columns), num_warps=4, num_stages=2,
    )  # fmt: skip
    return inner
