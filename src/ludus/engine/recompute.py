"""How many of a model's layers are computed again in the backward pass, instead of keeping what they made.

The number is kept beside the model, not in it: Hugging Face's forward reads it from its layers, where
`set_recompute` writes it too, and any other forward over the same parameters asks `recomputed_layers`. Without
gradients nothing is kept, and nothing computed again.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.checkpoint import checkpoint

from ludus.engine.backbone import decoder_of

_recomputed: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def set_recompute(model: nn.Module, layers: int) -> None:
    """Compute the first so many layers again in the backward pass; more than there are means all."""
    decoder = decoder_of(model)
    blocks = _blocks(decoder)
    layers = max(0, min(layers, len(blocks)))
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = number < layers
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    _recomputed[decoder] = layers


def recomputed_layers(model: nn.Module) -> int:
    """How many layers `set_recompute` asked for; none when it has not been called."""
    return _recomputed.get(decoder_of(model), 0)


def recomputable_layers(model: nn.Module) -> int:
    """How many layers the model has that can be computed again; 0 when its architecture has no way to."""
    return len(_blocks(decoder_of(model)))


def _blocks(decoder: nn.Module) -> list[Any]:
    """The layers that know of gradient checkpointing, in order."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    return [layer for layer in layers if hasattr(layer, "gradient_checkpointing")]
