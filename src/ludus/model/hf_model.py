"""A Hugging Face causal LM: its parts, its limits, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludus.core.failures import ConfigError
from ludus.model.attention import current_context, current_positions, running


def unwrapped(model: nn.Module) -> Any:
    """The Hugging Face model inside an adapter wrapper (PEFT), or the model itself."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def decoder_of(model: nn.Module) -> Any:
    """The part of a causal LM below its head."""
    inner = unwrapped(model)
    if not hasattr(inner, "get_decoder") or inner.get_output_embeddings() is None:
        raise ConfigError(f"{type(inner).__name__} is not a Hugging Face causal language model")
    decoder = inner.get_decoder()
    if decoder is inner or not hasattr(decoder, "get_input_embeddings"):
        decoder = getattr(inner, "model", inner)  # Llama 4's base_model_prefix names no part of it
    if decoder is inner or not hasattr(decoder, "get_input_embeddings"):
        raise ConfigError(f"{type(inner).__name__} does not say which part of it is the decoder")
    return decoder


_ALONE = "ludus_rows_alone"


def rows_alone(model: nn.Module) -> str | None:
    """Why each row goes through the module's own forward by itself; None where Ludus' attention serves it.

    It is kept in the decoder, so that a copy of the model is run in the same way.
    """
    reason: str | None = vars(decoder_of(model)).get(_ALONE)
    return reason


def run_rows_alone(model: nn.Module, reason: str) -> None:
    """Run each row by itself from now on."""
    setattr(decoder_of(model), _ALONE, reason)


_SEEING = ("qwen3_5", "qwen3_5_moe")
"""Model types with a class for text alone beside the one that sees, which is loaded."""


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a causal LM of this configuration, its vision part included."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in _SEEING
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees and not is_text else AutoModelForCausalLM


def text_config(model: nn.Module) -> Any:
    """The configuration of the language part."""
    return unwrapped(model).config.get_text_config()


def head_shape(config: Any) -> tuple[int, int, int]:
    """(query heads, key heads, size of a head) of a language part, by its configuration."""
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, int(kv_heads), int(size)


def context_limit(model: nn.Module) -> int | None:
    """The model's context length in tokens; None when it does not say."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return int(limit) if limit else None


def vocabulary_size(model: nn.Module) -> int:
    """Rows of the embedding."""
    return int(unwrapped(model).get_input_embeddings().weight.shape[0])


def device_of(model: nn.Module) -> torch.device:
    """The device of the decoder's embedding (a critic has a decoder and no embedding of its own)."""
    device: torch.device = decoder_of(model).get_input_embeddings().weight.device
    return device


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off; each module's training mode is restored afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


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
            if tensor.dtype in (torch.bfloat16, torch.float16) and tensor not in swapped:
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
        for block in _called_modules(decoder)
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


def _called_modules(decoder: nn.Module) -> Iterator[nn.Module]:
    """Modules that a decoder calls in order: embedding, layers, final norm."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield child


# Activation checkpointing. The number of layers is kept beside the model: Hugging Face's forward reads the flag
# from its layers, the fused forward asks `checkpointed_layers`. Without gradients it has no effect.


_checkpointed: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def set_activation_checkpointing(model: nn.Module, layers: int) -> None:
    """Checkpoint the first `layers` layers: they are recomputed in the backward pass."""
    decoder = decoder_of(model)
    blocks = _checkpointable(decoder)
    layers = max(0, min(layers, len(blocks)))
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = number < layers
        block._gradient_checkpointing_func = _checkpoint
    _checkpointed[decoder] = layers


def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Checkpoint a layer; it is recomputed with its own attention context, on whatever thread."""
    by = current_context(), current_positions()
    return checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), running(*by))
    )


def checkpointed_layers(model: nn.Module) -> int:
    """How many layers are checkpointed; 0 by default."""
    return _checkpointed.get(decoder_of(model), 0)


def checkpointable_layers(model: nn.Module) -> int:
    """How many layers can be checkpointed; 0 when the architecture does not support it."""
    return len(_checkpointable(decoder_of(model)))


def _checkpointable(decoder: nn.Module) -> list[Any]:
    """The layers that support gradient checkpointing, in order."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    return [layer for layer in layers if hasattr(layer, "gradient_checkpointing")]
