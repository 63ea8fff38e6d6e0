"""Comparing two ways to compute a model's hidden states: exactly in float32, up to rounding in half precision.

Trained weights have massive activations, which amplify rounding: in bfloat16, stock eager and stock SDPA
attention can differ by half a token's norm. No fixed tolerance tells a wrong result from rounding there. So
the structure is compared in float32, and what runs in half precision must come as close to the float32 result
as the stock module in the same format does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ludus.engine.backbone import decoder_of, unwrapped, vocabulary_size

_HALF = (torch.bfloat16, torch.float16)
_EXACT = 1e-4
_ROUNDED = 0.05
# How much larger than the stock module's rounding error another kernel's may be.
_SLACK = 2.0


def probe_tokens(model: nn.Module, count: int) -> Tensor:
    """A few arbitrary tokens of the model's vocabulary, on its device."""
    device = unwrapped(model).get_input_embeddings().weight.device
    return (torch.arange(count, device=device) * 7 + 3) % vocabulary_size(model)


def agree(given: Tensor, expected: Tensor) -> bool:
    """Whether two results of the same arithmetic are equal, as far as their precision allows."""
    if given.shape != expected.shape:
        return False
    tolerance = _EXACT if expected.dtype == torch.float32 else _ROUNDED
    scale = max(1.0, float(expected.float().abs().max()))
    return float((given.float() - expected.float()).abs().max()) <= tolerance * scale


def agree_up_to_rounding(given_TD: Tensor, stock_TD: Tensor, exact_TD: Tensor) -> bool:
    """Whether `given` is about as close to the float32 result as the stock module in the same format.

    The error is relative to each token's norm and averaged over tokens: rounding throws single tokens far off.
    """
    if given_TD.shape != exact_TD.shape:
        return False
    if given_TD.dtype == torch.float32:
        return agree(given_TD, exact_TD)
    allowed = _ROUNDED + _SLACK * _relative_error(stock_TD, exact_TD)
    return _relative_error(given_TD, exact_TD) <= allowed


def _relative_error(given_TD: Tensor, exact_TD: Tensor) -> float:
    exact = exact_TD.float()
    distance_T = (given_TD.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-6)
    return float(distance_T.mean())


@contextmanager
def computed_in_float32(model: nn.Module) -> Iterator[None]:
    """Run the decoder's own forward in float32, whatever format its weights have.

    Each block is converted when it is called and put back afterwards, so one block at a time needs the memory.
    The parameters keep their storage: what knows their addresses (graphs, optimizers) sees no change.
    """
    decoder = decoder_of(model)
    swapped: dict[Tensor, Tensor] = {}

    def widen(tensors: Iterator[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dtype in _HALF and tensor not in swapped:
                swapped[tensor] = tensor.data
                tensor.data = tensor.data.float()

    def restore(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor in swapped:
                tensor.data = swapped.pop(tensor)

    def before(block: nn.Module, *_: Any) -> None:
        widen(_tensors(block))

    def after(block: nn.Module, *_: Any) -> None:
        restore(list(_tensors(block)))

    precision = torch.get_float32_matmul_precision()
    hooks = [
        hook
        for block in _blocks(decoder)
        for hook in (
            block.register_forward_pre_hook(before, prepend=True),
            block.register_forward_hook(after, always_call=True),
        )
    ]
    try:
        torch.set_float32_matmul_precision("highest")
        widen(_tensors(decoder, recurse=False))
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for hook in hooks:
            hook.remove()
        restore(list(swapped))


def _tensors(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _blocks(decoder: nn.Module) -> Iterator[nn.Module]:
    """What a decoder calls one after the other: embedding, layers, final norm."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield child
