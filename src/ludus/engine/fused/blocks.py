"""The two halves of a layer around attention, each as one step of the backward pass.

Autograd would keep the output of every norm, and what a gate lets through, for the product that follows. Here
only what goes into them is kept, and the kernels of their backward passes make their outputs once more. And a
layer costs the host three calls in the backward pass instead of seven, which is what small models wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.engine.fused.joining import can_join, joined_parameters, joint_parameters
from ludus.kernels import unavailable


def fits(x: Tensor, joined: Sequence[nn.Module], others: Sequence[nn.Module] = ()) -> bool:
    """Whether these layers are plain enough, and gradients are wanted where the kernels run."""
    if not torch.is_grad_enabled() or unavailable(x.device) is not None:
        return False
    plain = all(type(layer) is nn.Linear and layer.bias is None for layer in others)
    return plain and can_join(joined)


def qkv_block(
    added: Tensor | None,
    residual: Tensor,
    norm: tuple[Tensor, float],
    projections: Sequence[nn.Module],
    angles: tuple[Tensor, Tensor],
    heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query, key, value, residual): add, norm, project, rotate."""
    parameters = joined_parameters(projections)
    query, key, value, total = _Qkv.apply(
        added, residual, *norm, *angles, *heads, len(projections), *parameters
    )
    return query, key, value, residual if added is None else total


def mlp_block(
    added: Tensor,
    residual: Tensor,
    norm: tuple[Tensor, float],
    gate_up: Sequence[nn.Module],
    down: nn.Module,
) -> tuple[Tensor, Tensor]:
    """(what the block adds, residual): add, norm, open the gate, project."""
    parameters = joined_parameters(gate_up)
    out, total = _Mlp.apply(added, residual, *norm, down.weight, len(gate_up), *parameters)
    return out, total


def _slopes(
    grad: Tensor, x: Tensor, parameters: Sequence[Tensor], count: int, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of joined weights and biases, given those of their output."""
    widths = [len(parameter) for parameter in parameters[:count]]
    found: list[Tensor | None] = [None] * len(parameters)
    if any(needed[:count]):
        found[:count] = torch.split(grad.t() @ x, widths)
    if any(needed[count:]):
        found[count:] = torch.split(grad.sum(0), widths)
    return [slope if is_needed else None for slope, is_needed in zip(found, needed, strict=True)]


class _Qkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        added: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        count: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        from ludus.kernels.compiled import norm, rotary

        ctx.set_materialize_grads(False)
        if added is None:
            normed, total, rstd = norm.forward(residual.contiguous(), None, weight, eps)
        else:
            normed, total, rstd = norm.forward(added.contiguous(), residual.contiguous(), weight, eps)
        states = functional.linear(normed, *joint_parameters(parameters, count))
        ctx.save_for_backward(total, rstd, weight, cos, sin, *parameters)
        ctx.count, ctx.is_first = count, added is None
        split = rotary.split(states, cos.contiguous(), sin.contiguous(), heads, kv_heads)
        return *split, None if added is None else total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from ludus.kernels.compiled import norm, rotary

        total, rstd, weight, cos, sin, *parameters = ctx.saved_tensors
        dquery, dkey, dvalue, dtotal = grads
        assert dquery is not None and dkey is not None and dvalue is not None
        joint = rotary.join(
            dquery.contiguous(),
            dkey.contiguous(),
            dvalue.contiguous(),
            cos.contiguous(),
            sin.contiguous(),
        )
        matrix, _ = joint_parameters(parameters, ctx.count)
        normed = torch.empty_like(total)
        dx, dweight = norm.backward(joint @ matrix, _whole(dtotal), total, weight, rstd, normed)
        slopes = _slopes(joint, normed, parameters, ctx.count, ctx.needs_input_grad[9:])
        return None if ctx.is_first else dx, dx, dweight, None, None, None, None, None, None, *slopes


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        added: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        down: Tensor,
        count: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        from ludus.kernels.compiled import gating, norm

        ctx.set_materialize_grads(False)
        normed, total, rstd = norm.forward(added.contiguous(), residual.contiguous(), weight, eps)
        both = functional.linear(normed, *joint_parameters(parameters, count))
        ctx.save_for_backward(total, rstd, weight, both, down, *parameters)
        ctx.count = count
        return functional.linear(gating.forward(both), down), total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from ludus.kernels.compiled import gating, norm

        total, rstd, weight, both, down, *parameters = ctx.saved_tensors
        dout, dtotal = grads
        assert dout is not None
        dout = dout.contiguous()
        product = both.new_empty(len(both), both.shape[1] // 2)
        dboth = gating.backward(dout @ down, both, product)
        ddown = dout.t() @ product if ctx.needs_input_grad[4] else None
        del product
        matrix, _ = joint_parameters(parameters, ctx.count)
        normed = torch.empty_like(total)
        dx, dweight = norm.backward(dboth @ matrix, _whole(dtotal), total, weight, rstd, normed)
        slopes = _slopes(dboth, normed, parameters, ctx.count, ctx.needs_input_grad[6:])
        return dx, dx, dweight, None, ddown, None, *slopes


def _whole(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()
