"""Root-mean-square norm (Zhang and Sennrich, 2019), rounded as transformers rounds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ludus.kernels.support import unavailable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last dimension."""
    if unavailable(x.device) is None:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        normed: Tensor = _Norm.apply(flat, weight, eps)
        return normed.view(x.shape)
    return plain_rms_norm(x, weight, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum) of what a block adds and what it is added to."""
    if unavailable(x_TD.device) is None:
        normed, total = _AddNorm.apply(x_TD.contiguous(), residual_TD.contiguous(), weight, eps)
        return normed, total
    total = x_TD + residual_TD
    return plain_rms_norm(total, weight, eps), total


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * unit.to(x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from ludus.kernels.compiled import norm

        normed, _, rstd = norm.forward(x, None, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from ludus.kernels.compiled import norm

        dx, dweight = norm.backward(grads[0].contiguous(), None, *ctx.saved_tensors)
        return dx, dweight, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        from ludus.kernels.compiled import norm

        normed, total, rstd = norm.forward(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from ludus.kernels.compiled import norm

        dx, dweight = norm.backward(grads[0].contiguous(), grads[1].contiguous(), *ctx.saved_tensors)
        return dx, dx, dweight, None
