"""Rotary positions on joint query, key and value rows [T, (Hq + 2 Hkv) D].

Halves are rotated against each other (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), as in Llama.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ludus.kernels.support import next_power_of_2


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
def _split(
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
def _store(
    QKV, COS, SIN, Q, KEYS, VALUES, SLOTS, half, heads, kv_heads, page_size,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Joint rows to a rotated query, with key and value written to their slots in the pages."""
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
    page, offset = slot // page_size, slot % page_size
    target = ((page * kv_heads + kv_head) * page_size + offset)[:, None] * size + at[None, :]
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


def split(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated query [T, Hq, D] and key [T, Hkv, D], and value."""
    rows, size = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
    query = qkv.new_empty(rows, heads, size)
    key, value = qkv.new_empty(rows, kv_heads, size), qkv.new_empty(rows, kv_heads, size)
    half = size // 2
    if rows:
        _split[(rows,)](
            qkv, cos, sin, query, key, value, half, heads, kv_heads,
            **_sizes(heads, kv_heads, half), BACKWARD=False, num_warps=4,
        )  # fmt: skip
    return query, key, value


def join(dquery: Tensor, dkey: Tensor, dvalue: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the joint rows."""
    rows, heads, size = dquery.shape
    kv_heads, half = dkey.shape[1], size // 2
    result = dquery.new_empty(rows, (heads + 2 * kv_heads) * size)
    if rows:
        _split[(rows,)](
            result, cos, sin, dquery, dkey, dvalue, half, heads, kv_heads,
            **_sizes(heads, kv_heads, half), BACKWARD=True, num_warps=4,
        )  # fmt: skip
    return result


def store(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor, heads: int
) -> Tensor:
    """The rotated query; key and value go to `slots` of pages [pages, Hkv, page_size, D]."""
    _, kv_heads, page_size, size = keys.shape
    query = qkv.new_empty(qkv.shape[0], heads, size)
    if len(qkv):
        _store[(len(qkv),)](
            qkv, cos, sin, query, keys, values, slots, size // 2, heads, kv_heads, page_size,
            **_sizes(heads, kv_heads, size // 2), num_warps=4,
        )  # fmt: skip
    return query


__all__ = ["join", "split", "store"]
