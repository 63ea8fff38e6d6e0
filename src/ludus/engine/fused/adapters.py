"""Linear layers with LoRA adapters beside them: the bases as one product, all adapters in two kernels.

An adapter's own forward (peft's) casts its input, multiplies twice, scales, adds and casts back, and keeps a
float32 copy of the input for the backward pass: six small kernels beside each product, and several times the
memory. What is computed here is the same, from the same parameters, which stay float32 and unmerged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.engine.fused.joining import can_join, joined_parameters, joint_parameters
from ludus.kernels import linear_float32, low_rank_add

_MOST = 3
"""Adapters that the kernels take at once."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is added to a layer: scaling * up(down(x))."""

    down: nn.Linear
    up: nn.Linear
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapted:
    """Layers that can be computed together; None stands for one to which nothing is added."""

    bases: tuple[nn.Module, ...]
    adapters: tuple[Adapter | None, ...]


def adapted(layers: Sequence[nn.Module]) -> Adapted | None:
    """The layers' parts; None where one of them computes in a way of its own, or they differ in kind."""
    parts = [_parts(layer) for layer in layers]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    found = Adapted(tuple(base for base, _ in known), tuple(adapter for _, adapter in known))
    present = [adapter for adapter in found.adapters if adapter is not None]
    kinds = {(a.scaling, a.down.weight.shape, a.down.weight.dtype, a.up.weight.dtype) for a in present}
    if len(kinds) > 1 or len(present) > _MOST or not can_join(found.bases):
        return None
    if present and any(p.requires_grad for base in found.bases for p in base.parameters()):
        return None
    return found


def _parts(layer: Any) -> tuple[nn.Module, Adapter | None] | None:
    """A layer's base and its adapter; the layer itself where it is plain."""
    if type(layer) is nn.Linear:
        return layer, None
    peft = sys.modules.get("peft.tuners.lora.layer")  # whoever has such a layer has imported it
    if peft is None or type(layer) is not peft.Linear or layer.merged or layer.fan_in_fan_out:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or not active:
        return layer.base_layer, None
    name, *others = active
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    is_plain = all(type(factor) is nn.Linear and factor.bias is None for factor in (down, up))
    is_whole = isinstance(dropout, nn.Identity) or not dropout.training or dropout.p == 0
    if others or name in layer.lora_variant or not (is_plain and is_whole):
        return None
    return layer.base_layer, Adapter(down, up, float(layer.scaling[name]))


def adapted_linear(layers: Adapted, x_TD: Tensor) -> Tensor:
    """The outputs of the layers side by side, [T, sum of their widths], with what adapters add."""
    columns, first = [], 0
    for base, adapter in zip(layers.bases, layers.adapters, strict=True):
        width = len(base.weight)  # type: ignore[arg-type]
        if adapter is not None:
            columns.append((first, width))
        first += width
    present = [adapter for adapter in layers.adapters if adapter is not None]
    bases = joined_parameters(layers.bases)
    downs = joined_parameters([adapter.down for adapter in present])
    ups = joined_parameters([adapter.up for adapter in present])
    counts = (len(layers.bases), len(present))
    given = (counts, tuple(columns), present[0].scaling, *bases, *downs, *ups)
    if not torch.is_grad_enabled():
        return _forward(x_TD, *given)[0]
    result: Tensor = _AdaptedProduct.apply(x_TD, *given)
    return result


def _matrices(counts: tuple[int, int], parameters: Sequence[Tensor]) -> tuple[Any, Tensor, Tensor]:
    """((weight, bias) of the bases, down, up), each as one matrix."""
    layers, adapters = counts
    bases, factors = parameters[: -2 * adapters], parameters[-2 * adapters :]
    down, _ = joint_parameters(factors[:adapters], adapters)
    up, _ = joint_parameters(factors[adapters:], adapters)
    return joint_parameters(bases, layers), down, up


def _forward(
    x: Tensor, counts: tuple[int, int], columns: Any, scaling: float, *parameters: Tensor
) -> tuple[Tensor, Tensor]:
    base, down, up = _matrices(counts, parameters)
    out = functional.linear(x, *base)
    return out, low_rank_add(out, x, down, up, columns, scaling)


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: tuple[int, int], columns: Any, scaling: float, *parameters: Tensor
    ) -> Tensor:
        out, inner_PTR = _forward(x, counts, columns, scaling, *parameters)
        ctx.save_for_backward(x, inner_PTR.sum(0), *parameters)
        ctx.given = counts, columns, scaling
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inner_TR, *parameters = ctx.saved_tensors
        counts, columns, scaling = ctx.given
        (weight, _), down, up = _matrices(counts, parameters)
        grad, kind = grads[0], x.dtype
        slopes = [grad[:, first : first + width] for first, width in columns]
        ups = up.to(kind).split([width for _, width in columns])
        dinner = (
            torch.cat([slope @ own for slope, own in zip(slopes, ups, strict=True)], dim=1) * scaling
        )
        inner = (inner_TR * scaling).to(kind).split(up.shape[1], dim=1)
        dups = [linear_float32(slope.t(), own.t()) for slope, own in zip(slopes, inner, strict=True)]
        ddowns = linear_float32(dinner.t(), x.t()).split(up.shape[1])
        dx = torch.addmm(grad @ weight, dinner, down.to(kind)) if ctx.needs_input_grad[0] else None
        frozen = [None] * (len(parameters) - 2 * counts[1])
        factors = (
            g.to(p.dtype) for g, p in zip((*ddowns, *dups), parameters[len(frozen) :], strict=True)
        )
        return dx, None, None, None, *frozen, *factors
