"""A Hugging Face causal LM: its parts, limits, memory needs and activation checkpointing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ludus.core.failures import ConfigError
from ludus.engine.config import EngineConfig
from ludus.kernels.device import free_memory


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
    if decoder is inner:
        raise ConfigError(f"{type(inner).__name__} does not say which part of it is the decoder")
    return decoder


def text_config(model: nn.Module) -> Any:
    """The configuration of the language part."""
    return unwrapped(model).config.get_text_config()


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
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    _checkpointed[decoder] = layers


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


# Default size of the KV cache: of the free memory of a GPU, of all memory of a host.
_SHARE = {"cuda": 0.4, "cpu": 0.125}
_WITHOUT_LIMIT = 32768
_STEP_TOKENS = {"cuda": 8192}
_STEP_TOKENS_ELSEWHERE = 2048
# With less of a GPU free than this, a trainer gets the cache's memory while the engine pauses.
_PLENTY = 0.4


def cache_blocks(model: nn.Module, config: EngineConfig) -> int:
    """Size of the KV cache in blocks: as configured, or what full batches need, within a share of memory."""
    tokens = config.cache_tokens
    if tokens is None:
        wanted = config.max_running * (context_limit(model) or _WITHOUT_LIMIT)
        tokens = min(wanted, int(_memory(model, config.memory) / bytes_per_token(model)))
    return max(1, -(-tokens // config.block_size))


def max_step_tokens(model: nn.Module, config: EngineConfig) -> int:
    """Token budget of a step: as configured, or what suits the device."""
    if config.tokens_per_step is not None:
        return config.tokens_per_step
    return max(config.max_running, _STEP_TOKENS.get(device_of(model).type, _STEP_TOKENS_ELSEWHERE))


def releases_memory(model: nn.Module, config: EngineConfig) -> bool:
    """Whether a pause that begins now gives the KV cache's memory to the trainer."""
    device = device_of(model)
    if config.release_memory != "auto" or device.type != "cuda":
        return config.release_memory == "always"
    free, total = free_memory(device)
    return free < _PLENTY * total


def bytes_per_token(model: nn.Module) -> int:
    """Bytes of one token's keys and values in all layers."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = unwrapped(model).get_input_embeddings().weight.element_size()
    return int(2 * config.num_hidden_layers * heads * size * element)


def _memory(model: nn.Module, share: float | None) -> float:
    device = device_of(model)
    if device.type == "cuda":
        return (share or _SHARE["cuda"]) * torch.cuda.mem_get_info(device)[0]
    return (share or _SHARE["cpu"]) * all_memory(device)


def all_memory(device: torch.device) -> int:
    """The bytes of a GPU, or of this machine, as far as its container lets it use them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed, *_container_limits()])


def _container_limits() -> list[int]:
    """Memory limits of a container, if any (cgroup v1 and v2)."""
    files = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    texts = [Path(name).read_text().strip() for name in files if Path(name).is_file()]
    return [int(text) for text in texts if text.isdigit()]
