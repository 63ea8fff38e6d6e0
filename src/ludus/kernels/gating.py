"""The gate of a SwiGLU block."""

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
