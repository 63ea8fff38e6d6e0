"""Several linear layers over the same input as one product.

Their weights are moved, once, into one storage in which they lie end to end; each parameter stays a
parameter of its own, a view of its rows. Optimizers, loaders and savers see what they saw before, and write in
place; the product sees one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def joint_product(layers: Sequence[nn.Module], x_TD: Tensor) -> Tensor:
    """The outputs of several plain layers side by side, [T, sum of their widths]."""
    parameters = joined_parameters(layers)
    if not torch.is_grad_enabled():
        return _product(x_TD, *joint_parameters(parameters, len(layers)))
    result: Tensor = _JointProduct.apply(x_TD, len(layers), *parameters)
    return result


def can_join(layers: Sequence[nn.Module]) -> bool:
    """Whether these are plain linear layers of one format, all with a bias or all without."""
    if not all(type(layer) is nn.Linear for layer in layers):
        return False
    kinds = {(layer.weight.dtype, layer.weight.device, layer.in_features) for layer in layers}
    return len(kinds) == 1 and len({layer.bias is None for layer in layers}) == 1


def is_joined(layers: Sequence[nn.Module]) -> bool:
    """Whether their parameters lie end to end in one storage."""
    named: list[list[Any]] = [[layer.weight for layer in layers]]
    if layers[0].bias is not None:
        named.append([layer.bias for layer in layers])
    return all(_end_to_end(tensors) for tensors in named)


def join(layers: Sequence[nn.Module]) -> None:
    """Move the parameters into one storage. What knew their old addresses must look again."""
    with torch.inference_mode(False), torch.no_grad():  # what is made in that mode can never be trained
        for name in ("weight", "bias"):
            parameters: list[Any] = [getattr(layer, name) for layer in layers]
            if parameters[0] is None:
                continue
            whole = torch.cat([parameter.data for parameter in parameters])
            pieces = torch.split(whole, [len(parameter) for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.data = piece


def joined_parameters(layers: Sequence[nn.Module]) -> list[Any]:
    """The weights, and then the biases, of layers that are joined now if they were not."""
    if not is_joined(layers):
        join(layers)
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


def joint_parameters(parameters: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor | None]:
    """The one matrix, and the one bias, behind joined parameters."""
    weights, biases = parameters[:count], parameters[count:]
    rows = sum(len(weight) for weight in weights)
    width = weights[0].shape[1]
    weight = weights[0].detach().as_strided((rows, width), (width, 1))
    bias = biases[0].detach().as_strided((rows,), (1,)) if biases else None
    return weight, bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


class _JointProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        weight, bias = joint_parameters(parameters, count)
        # The parameters, not the view: autograd then notices when one is changed before the backward pass.
        ctx.save_for_backward(x, *parameters)
        ctx.count = count
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        grad = grads[0]
        count, needed = ctx.count, ctx.needs_input_grad
        weight, _ = joint_parameters(parameters, count)
        widths = [len(parameter) for parameter in parameters[:count]]
        dx = grad @ weight if needed[0] else None
        found: list[Tensor | None] = [None] * len(parameters)
        if any(needed[2 : 2 + count]):
            found[:count] = torch.split(grad.t() @ x, widths)
        if any(needed[2 + count :]):
            found[count:] = torch.split(grad.sum(0), widths)
        wanted = [g if n else None for g, n in zip(found, needed[2:], strict=True)]
        return dx, None, *wanted
