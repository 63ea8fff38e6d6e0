"""Models without their weights: the module as it would be loaded, whose parameters take no memory.

Each rank of a sharded run makes the module so, and then reads its own parts of the weights (`weight_files.py`).
Buffers are real, and so are the weights of an adapter, which are drawn or read as for a whole model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def hollow_parameters() -> Iterator[None]:
    """Modules that this thread makes have their parameters on the meta device; each is there for a moment."""
    own = threading.get_ident()

    def emptied(module: nn.Module, name: str, parameter: Any) -> Any:
        if threading.get_ident() != own or not isinstance(parameter, nn.Parameter) or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)
    try:
        yield
    finally:
        hook.remove()


def is_hollow(model: nn.Module) -> bool:
    """Whether a model's weights have yet to be read."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Zeros of no memory in the place of parameters on the meta device.

    peft makes an adapter's weights on the device of the layer that it adapts, so that they are real then.
    """
    hollow = _replaced(model, lambda p: p.is_meta, _zeros)
    try:
        yield
    finally:
        stand_ins = {id(made) for made in hollow}
        _replaced(model, lambda p: id(p) in stand_ins, lambda p: p.detach().to("meta"))


def _zeros(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)


def _replaced(model: nn.Module, which: Any, make: Any) -> list[nn.Parameter]:
    """Replace parameters; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and which(parameter):
                if parameter not in made:
                    made[parameter] = nn.Parameter(make(parameter), parameter.requires_grad)
                module._parameters[name] = made[parameter]
    return list(made.values())
