"""Rotary positions (Su et al., 2021) on joint query, key and value rows, halves against each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ludus.kernels.support import unavailable


def rotate(
    qkv_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated query [T, Hq, D] and key [T, Hkv, D], and value, from rows [T, (Hq + 2 Hkv) D]."""
    if unavailable(qkv_TC.device) is None:
        query, key, value = _Rotation.apply(
            qkv_TC.contiguous(), cos_TD.contiguous(), sin_TD.contiguous(), heads, kv_heads
        )
        return query, key, value
    size = qkv_TC.shape[1] // (heads + 2 * kv_heads)
    states_THD = qkv_TC.view(len(qkv_TC), -1, size)
    query, key, value = torch.split(states_THD, [heads, kv_heads, kv_heads], dim=1)
    return plainly_rotated(query, cos_TD, sin_TD), plainly_rotated(key, cos_TD, sin_TD), value


def rotate_and_store(
    qkv_TC: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    heads: int,
    kv_heads: int,
    keys: Tensor,
    values: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """The rotated query; key and value go into pages [pages, Hkv, page_size, D] in place.

    A slot is page * page_size + offset. Every row writes: one that should leave nothing behind is given a slot
    that nobody reads.
    """
    if unavailable(qkv_TC.device) is None:
        from ludus.kernels.compiled import rotary

        return rotary.store(
            qkv_TC.contiguous(), cos_TD.contiguous(), sin_TD.contiguous(), keys, values, slots_T, heads
        )
    query, key, value = rotate(qkv_TC, cos_TD, sin_TD, heads, kv_heads)
    store(key, value, keys, values, slots_T)
    return query


def store(key_THD: Tensor, value_THD: Tensor, keys: Tensor, values: Tensor, slots_T: Tensor) -> None:
    """Put rotated keys and values into their slots."""
    page_T, offset_T = slots_T // keys.shape[2], slots_T % keys.shape[2]
    keys[page_T, :, offset_T] = key_THD.to(keys.dtype)
    values[page_T, :, offset_T] = value_THD.to(values.dtype)


def plainly_rotated(states_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = states_THD.chunk(2, dim=-1)
    crossed = torch.cat((-second, first), dim=-1)
    return states_THD * cos_TD[:, None] + crossed * sin_TD[:, None]


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from ludus.kernels.compiled import rotary

        ctx.save_for_backward(cos, sin)
        return rotary.split(qkv, cos, sin, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from ludus.kernels.compiled import rotary

        joint = rotary.join(*(grad.contiguous() for grad in grads), *ctx.saved_tensors)
        return joint, None, None, None, None
