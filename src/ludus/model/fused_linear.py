"""Several linear layers over the same input as one product, with LoRA adapters beside them.

The layers' weights are moved, once, into one storage in which they lie end to end; each stays a parameter of
its own, a view of its rows. Optimizers, loaders and savers see what they saw before, and write in place; the
product sees one matrix.

LoRA: peft's own forward casts its input, multiplies twice, scales, adds and casts back, and keeps a float32
copy of the input for the backward pass: six small kernels beside each product, and several times the memory.
Here all adapters take two kernels, over the same parameters, which stay float32 and unmerged; beside a
half-precision base, their gradients are products of half-precision operands, as those of the base's weights
would be.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.kernels import linear_float32, low_rank_add, low_rank_unusable
from ludus.kernels.layers import Columns


def stacked_product(layers: Sequence[nn.Module], x_TD: Tensor) -> Tensor:
    """The outputs of several plain layers side by side, [T, sum of their widths]."""
    parameters = stacked_parameters(layers)
    if not torch.is_grad_enabled():
        return functional.linear(x_TD, *stacked_matrix(parameters, len(layers)))
    result: Tensor = _StackedProduct.apply(x_TD, len(layers), *parameters)
    return result


def can_stack(layers: Sequence[nn.Module]) -> bool:
    """Whether these are plain linear layers of one format, all with a bias or all without."""
    if not all(type(layer) is nn.Linear for layer in layers):
        return False
    kinds = {(layer.weight.dtype, layer.weight.device, layer.in_features) for layer in layers}
    return len(kinds) == 1 and len({layer.bias is None for layer in layers}) == 1


def is_stacked(layers: Sequence[nn.Module]) -> bool:
    """Whether their parameters lie end to end in one storage."""
    named: list[list[Any]] = [[layer.weight for layer in layers]]
    if layers[0].bias is not None:
        named.append([layer.bias for layer in layers])
    return all(_end_to_end(tensors) for tensors in named)


def stack_parameters(layers: Sequence[nn.Module]) -> None:
    """Move the parameters into one storage. Their addresses change."""
    with torch.inference_mode(False), torch.no_grad():  # what is made in that mode can never be trained
        for name in ("weight", "bias"):
            parameters: list[Any] = [getattr(layer, name) for layer in layers]
            if parameters[0] is None:
                continue
            whole = torch.cat([parameter.data for parameter in parameters])
            pieces = torch.split(whole, [len(parameter) for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.data = piece


def stacked_parameters(layers: Sequence[nn.Module]) -> list[Any]:
    """The weights, then the biases, of the layers; stacks them first if they are not."""
    if not is_stacked(layers):
        stack_parameters(layers)
    weights: list[Any] = [layer.weight for layer in layers]
    return weights if layers[0].bias is None else weights + [layer.bias for layer in layers]


def _end_to_end(tensors: Sequence[Tensor]) -> bool:
    address = tensors[0].data_ptr()
    storage = tensors[0].untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address or tensor.untyped_storage().data_ptr() != storage:
            return False
        if not tensor.is_contiguous():
            return False
        address += tensor.nbytes
    return True


def stacked_matrix(parameters: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor | None]:
    """The one matrix, and the one bias, behind stacked parameters."""
    weights, biases = parameters[:count], parameters[count:]
    rows = sum(len(weight) for weight in weights)
    width = weights[0].shape[1]
    weight = weights[0].detach().as_strided((rows, width), (width, 1))
    bias = biases[0].detach().as_strided((rows,), (1,)) if biases else None
    return weight, bias


def parameter_grads(
    grad: Tensor, x: Tensor, parameters: Sequence[Tensor], count: int, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of stacked weights and biases, given the gradient of their output."""
    widths = [len(parameter) for parameter in parameters[:count]]
    found: list[Tensor | None] = [None] * len(parameters)
    if any(needed[:count]):
        found[:count] = torch.split(grad.t() @ x, widths)
    if any(needed[count:]):
        found[count:] = torch.split(grad.sum(0), widths)
    return [slope if is_needed else None for slope, is_needed in zip(found, needed, strict=True)]


class _StackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        weight, bias = stacked_matrix(parameters, count)
        # The parameters, not the view: autograd then notices when one is changed before the backward pass.
        ctx.save_for_backward(x, *parameters)
        ctx.count = count
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        grad = grads[0]
        count, needed = ctx.count, ctx.needs_input_grad
        weight, _ = stacked_matrix(parameters, count)
        dx = grad @ weight if needed[0] else None
        return dx, None, *parameter_grads(grad, x, parameters, count, needed[2:])


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """A LoRA adapter of a layer, which adds scaling * up(down(x))."""

    down: nn.Linear
    up: nn.Linear
    scaling: float


@dataclass(frozen=True, slots=True)
class LoRALayers:
    """Layers that can be computed together; an adapter is None where nothing is added."""

    bases: tuple[nn.Module, ...]
    adapters: tuple[LoRAAdapter | None, ...]


def find_lora(layers: Sequence[nn.Module]) -> LoRALayers | None:
    """The layers' bases and adapters; None where one is of another kind, or they differ."""
    parts = [_base_and_adapter(layer) for layer in layers]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    found = LoRALayers(tuple(base for base, _ in known), tuple(adapter for _, adapter in known))
    present = [adapter for adapter in found.adapters if adapter is not None]
    kinds = {(a.scaling, a.down.weight.shape, a.down.weight.dtype, a.up.weight.dtype) for a in present}
    if len(kinds) > 1 or not can_stack(found.bases):
        return None
    if present and any(
        p is not None and p.requires_grad for b in found.bases for p in (b.weight, b.bias)
    ):
        return None
    return found


def _base_and_adapter(layer: Any) -> tuple[nn.Module, LoRAAdapter | None] | None:
    """A layer's base and its adapter; the layer itself where it is plain."""
    if type(layer) is nn.Linear:
        return layer, None
    peft = sys.modules.get("peft.tuners.lora.layer")  # a model with such a layer has imported it
    if peft is None or type(layer) is not peft.Linear or layer.merged:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or not active:
        return layer.base_layer, None
    name, *others = active
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    is_plain = all(type(factor) is nn.Linear and factor.bias is None for factor in (down, up))
    is_plain &= not any(map(_is_patched, (layer, layer.base_layer, down, up)))
    is_whole = isinstance(dropout, nn.Identity) or not dropout.training or dropout.p == 0
    if others or name in layer.lora_variant or not (is_plain and is_whole):
        return None
    return layer.base_layer, LoRAAdapter(down, up, float(layer.scaling[name]))


def _is_patched(module: Any) -> bool:
    """Whether the module has hooks or a replaced forward."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def lora_linear(layers: LoRALayers, x_TD: Tensor) -> Tensor:
    """The outputs of the layers side by side, [T, sum of their widths], with what adapters add."""
    columns, first = [], 0
    for base, adapter in zip(layers.bases, layers.adapters, strict=True):
        width = len(base.weight)  # type: ignore[arg-type]
        if adapter is not None:
            columns.append((first, width))
        first += width
    present = [adapter for adapter in layers.adapters if adapter is not None]
    parameters = (
        *stacked_parameters(layers.bases),
        *stacked_parameters([adapter.down for adapter in present]),
        *stacked_parameters([adapter.up for adapter in present]),
    )
    count, scaling = len(layers.bases), present[0].scaling
    if not torch.is_grad_enabled():
        plain, down, up = _matrices(count, len(present), parameters)
        out = functional.linear(x_TD, *plain)
        low_rank_add(out, x_TD, down, up, columns, scaling)
        return out
    result: Tensor = _LoRAProduct.apply(x_TD, count, columns, scaling, *parameters)
    return result


def _matrices(
    layers: int, adapters: int, parameters: Sequence[Tensor]
) -> tuple[tuple[Tensor, Tensor | None], Tensor, Tensor]:
    """((weight, bias) of the bases, down, up), each as one matrix."""
    bases, factors = parameters[: -2 * adapters], parameters[-2 * adapters :]
    down, _ = stacked_matrix(factors[:adapters], adapters)
    up, _ = stacked_matrix(factors[adapters:], adapters)
    return stacked_matrix(bases, layers), down, up


class _LoRAProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: int, columns: Columns, scaling: float, *parameters: Tensor
    ) -> Tensor:
        plain, down, up = _matrices(layers, len(columns), parameters)
        out = functional.linear(x, *plain)
        inner_PTR = low_rank_add(out, x, down, up, columns, scaling)
        # The matrices are what the backward pass reads: until then, parameters may be joined in another way.
        # The parameters are saved all the same, so that autograd notices when one of them is changed.
        inner_TR = inner_PTR[0] if len(inner_PTR) == 1 else inner_PTR.sum(0)
        ctx.save_for_backward(x, (inner_TR * scaling).to(x.dtype), *parameters)
        ctx.given = columns, scaling, plain[0], down, up
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inner_TR, *parameters = ctx.saved_tensors
        columns, scaling, weight, down, up = ctx.given
        grad, kind, rank = grads[0], x.dtype, up.shape[1]
        ups = torch.split((up * scaling).to(kind), [width for _, width in columns])
        grads_inner = [
            grad[:, first : first + width] @ own
            for (first, width), own in zip(columns, ups, strict=True)
        ]
        dinner = torch.cat(grads_inner, dim=1) if len(grads_inner) > 1 else grads_inner[0]
        # Of all columns with all adapters, because one product costs the host less than one each: the blocks
        # beside the diagonal are left.
        dup_NR = linear_float32(grad.t(), inner_TR.t())
        dups = [
            dup_NR[first : first + width, number * rank : (number + 1) * rank]
            for number, (first, width) in enumerate(columns)
        ]
        ddowns = torch.split(linear_float32(dinner.t(), x.t()), rank)
        dx = torch.addmm(grad @ weight, dinner, down.to(kind)) if ctx.needs_input_grad[0] else None
        frozen = [None] * (len(parameters) - 2 * len(columns))
        return dx, None, None, None, *frozen, *ddowns, *dups


def stacked_linear(layers: Sequence[nn.Module], x_TD: Tensor) -> Tensor:
    """The outputs of several layers side by side, [T, sum of their widths]."""
    if len(layers) > 1 and can_stack(layers):
        return stacked_product(layers, x_TD)
    found = None if type(layers[0]) is nn.Linear and len(layers) == 1 else find_lora(layers)
    if found is not None and not any(found.adapters):  # all of them are off
        return stacked_linear(found.bases, x_TD)
    if found is not None and not low_rank_unusable(x_TD.device):
        return lora_linear(found, x_TD)
    if len(layers) > 1:
        return torch.cat([stacked_linear([layer], x_TD) for layer in layers], dim=-1)
    result: Tensor = layers[0](x_TD)  # one plain layer, or one of another kind
    return result
