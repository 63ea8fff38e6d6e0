"""The gate of a SwiGLU block, alone and with the product that follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ludus.kernels.support import unavailable


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where the last dimension holds gate and up one after the other."""
    if unavailable(gate_up.device) is None:
        flat = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        product: Tensor = _Gate.apply(flat)
        return product.view(*gate_up.shape[:-1], -1)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gated_linear(gate_up_TI: Tensor, weight_DI: Tensor) -> Tensor:
    """silu(gate) * up, times weight^T: [T, D].

    The widest thing in a block, what the gate lets through, is not kept for the backward pass: it is made once
    more by the kernel that computes the gate's gradient, which has all it needs at hand.
    """
    if unavailable(gate_up_TI.device) is None and torch.is_grad_enabled():
        result: Tensor = _GatedLinear.apply(gate_up_TI.contiguous(), weight_DI)
        return result
    return functional.linear(silu_mul(gate_up_TI), weight_DI)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        from ludus.kernels.compiled import gating

        ctx.save_for_backward(both)
        return gating.forward(both)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from ludus.kernels.compiled import gating

        return gating.backward(grads[0].contiguous(), *ctx.saved_tensors)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor) -> Tensor:
        from ludus.kernels.compiled import gating

        ctx.save_for_backward(both, weight)
        return functional.linear(gating.forward(both), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        from ludus.kernels.compiled import gating

        both, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        product = both.new_empty(len(both), both.shape[1] // 2) if ctx.needs_input_grad[1] else None
        dboth = gating.backward(grad @ weight, both, product)
        return dboth, None if product is None else grad.t() @ product
