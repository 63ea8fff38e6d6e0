"""The operations of a transformer layer: float32 products, RMS norm, SwiGLU gate and rotary positions.

Each runs as Triton kernels (`triton_layers`) where they are available, and in plain torch elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ludus.kernels.device import unavailable

_HALF = (torch.bfloat16, torch.float16)


def linear_float32(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """x weight^T in float32 [T, V].

    Matrix units sum in float32 anyway; logits rounded to bf16 afterwards would be off by up to 0.03 at a
    magnitude of 10, which is more than all else together.
    """
    if x_TD.device.type == "cuda" and x_TD.dtype in _HALF and weight_VD.dtype == x_TD.dtype:
        return torch.mm(x_TD, weight_VD.t(), out_dtype=torch.float32)
    return x_TD.float() @ weight_VD.float().t()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last dimension (Zhang and Sennrich, 2019), rounded as transformers does."""
    if unavailable(x.device) is None:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        normed: Tensor = _Norm.apply(flat, weight, eps)
        return normed.view(x.shape)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum) of what a block adds and what it is added to."""
    if unavailable(x_TD.device) is None:
        normed, total = _AddNorm.apply(x_TD.contiguous(), residual_TD.contiguous(), weight, eps)
        return normed, total
    total = x_TD + residual_TD
    return rms_norm_reference(total, weight, eps), total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * unit.to(x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from ludus.kernels import triton_layers

        normed, _, rstd = triton_layers.rms_norm_forward(x, None, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from ludus.kernels import triton_layers

        dx, dweight = triton_layers.rms_norm_backward(grads[0].contiguous(), None, *ctx.saved_tensors)
        return dx, dweight, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        from ludus.kernels import triton_layers

        normed, total, rstd = triton_layers.rms_norm_forward(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from ludus.kernels import triton_layers

        dx, dweight = triton_layers.rms_norm_backward(
            grads[0].contiguous(), grads[1].contiguous(), *ctx.saved_tensors
        )
        return dx, dx, dweight, None


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's silu(gate) * up, where the last dimension holds gate and up one after the other."""
    if unavailable(gate_up.device) is None:
        flat = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        product: Tensor = _Gate.apply(flat)
        return product.view(*gate_up.shape[:-1], -1)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        from ludus.kernels import triton_layers

        ctx.save_for_backward(both)
        return triton_layers.silu_mul_forward(both)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from ludus.kernels import triton_layers

        return triton_layers.silu_mul_backward(grads[0].contiguous(), *ctx.saved_tensors)


def rotate(
    qkv_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary positions (Su et al., 2021): query [T, Hq, D], key [T, Hkv, D], value of rows [T, all D]."""
    if unavailable(qkv_TC.device) is None:
        query, key, value = _Rotation.apply(
            qkv_TC.contiguous(), cos_TD.contiguous(), sin_TD.contiguous(), heads, kv_heads
        )
        return query, key, value
    size = qkv_TC.shape[1] // (heads + 2 * kv_heads)
    states_THD = qkv_TC.view(len(qkv_TC), -1, size)
    query, key, value = torch.split(states_THD, [heads, kv_heads, kv_heads], dim=1)
    return rotate_reference(query, cos_TD, sin_TD), rotate_reference(key, cos_TD, sin_TD), value


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
    """The rotated query; key and value go into the KV cache [blocks, Hkv, block_size, D] in place.

    A slot is block * block_size + offset. Every row writes: an idle one is given a slot that is never read.
    """
    if unavailable(qkv_TC.device) is None:
        from ludus.kernels import triton_layers

        return triton_layers.rotary_store(
            qkv_TC.contiguous(), cos_TD.contiguous(), sin_TD.contiguous(), keys, values, slots_T, heads
        )
    query, key, value = rotate(qkv_TC, cos_TD, sin_TD, heads, kv_heads)
    store_kv(key, value, keys, values, slots_T)
    return query


def store_kv(key_THD: Tensor, value_THD: Tensor, keys: Tensor, values: Tensor, slots_T: Tensor) -> None:
    """Put rotated keys and values into their slots."""
    block_T, offset_T = slots_T // keys.shape[2], slots_T % keys.shape[2]
    keys[block_T, :, offset_T] = key_THD.to(keys.dtype)
    values[block_T, :, offset_T] = value_THD.to(values.dtype)


def rotate_reference(states_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = states_THD.chunk(2, dim=-1)
    crossed = torch.cat((-second, first), dim=-1)
    return states_THD * cos_TD[:, None] + crossed * sin_TD[:, None]


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from ludus.kernels import triton_layers

        ctx.save_for_backward(cos, sin)
        return triton_layers.rotary_split(qkv, cos, sin, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from ludus.kernels import triton_layers

        joint = triton_layers.rotary_join(*(grad.contiguous() for grad in grads), *ctx.saved_tensors)
        return joint, None, None, None, None
