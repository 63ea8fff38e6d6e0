"""Triton kernels of `layers`: RMS norm with the residual add, SwiGLU gate and rotary positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludus.kernels.device import next_power_of_2

# Programs that share the rows of a backward pass: each keeps its own sum for the weight's gradient.
_BACKWARD_PROGRAMS = 528


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

_BLOCK = 1024


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
