"""The operations of a transformer layer: RMS norm, SwiGLU gate, rotary positions, LoRA.

Each runs as Triton kernels (`triton_layers`) where they are available, and in plain torch elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ludus.kernels.device import trial_failure, unavailable

log = logging.getLogger(__name__)


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


# LoRA


Columns = Sequence[tuple[int, int]]
"""(first column, number of columns) of each adapter's output."""


def low_rank_add(
    out_TN: Tensor, x_TD: Tensor, down_RD: Tensor, up_MK: Tensor, columns: Columns, scaling: float
) -> Tensor:
    """Add scaling * (x down^T) up^T to `out`, in place; all but `x` are contiguous.

    `down` holds the adapters' first factors one below the other, K rows each, and `up` their second ones. They
    may be finer than `x`. Sums are float32, and so is what comes back: x down^T in P parts [P, T, R] to be
    summed.
    """
    if unavailable(x_TD.device) is None:
        from ludus.kernels import triton_layers

        return triton_layers.low_rank_add(out_TN, x_TD, down_RD, up_MK, columns, scaling)
    return low_rank_add_reference(out_TN, x_TD, down_RD, up_MK, columns, scaling)


def low_rank_add_reference(
    out_TN: Tensor, x_TD: Tensor, down_RD: Tensor, up_MK: Tensor, columns: Columns, scaling: float
) -> Tensor:
    """`low_rank_add` in plain torch."""
    inner_TR = x_TD.float() @ down_RD.float().t()
    inner = inner_TR.split(up_MK.shape[1], dim=1)
    ups = up_MK.float().split([width for _, width in columns])
    for own_TK, up, (first, width) in zip(inner, ups, columns, strict=True):
        part = out_TN[:, first : first + width]
        part.copy_(part.float() + scaling * (own_TK @ up.t()))
    return inner_TR[None]


@cache
def low_rank_unusable(device: torch.device) -> bool:
    """Whether the kernels fail a trial against plain torch on this device."""
    if unavailable(device) is not None:
        return False  # plain torch is used here
    reason = trial_failure(_lora_agrees, device, "the kernels give other numbers than plain operations")
    if reason is not None:
        log.warning("adapters are computed layer by layer on %s, which is slower: %s", device, reason)
    return reason is not None


def _lora_agrees(device: torch.device) -> bool:
    """Whether two adapters add to a few numbers what they should."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(20, 90), (20, 700), (10, 700), (80, 5)]
    out, x, down, up = (torch.randn(*size, generator=draw) for size in sizes)
    columns = ((0, 40), (50, 40))
    results = []
    for add, place in ((low_rank_add, device), (low_rank_add_reference, torch.device("cpu"))):
        sums = out.bfloat16().to(place, copy=True)
        add(sums, x.bfloat16().to(place), down.to(place), up.to(place), columns, 0.1)
        results.append(sums.float().cpu())
    return bool((results[0] - results[1]).norm() < 0.01 * results[1].norm())
