"""Where a model computes, how large a KV cache it may have, and when a trainer has a better use for that."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ludus.engine.backbone import context_limit, text_config, unwrapped
from ludus.engine.config import EngineConfig

# Of the free memory of a GPU, of all memory of a host.
_SHARE = {"cuda": 0.4, "cpu": 0.125}
_WITHOUT_LIMIT = 32768
_STEP_TOKENS = {"cuda": 8192}
_STEP_TOKENS_ELSEWHERE = 2048
# With less of a GPU free than this, a trainer gets the cache's memory while the engine pauses.
_PLENTY = 0.4


def cache_pages(model: nn.Module, config: EngineConfig) -> int:
    """The number of pages: as configured, or what full batches need, within a share of memory."""
    tokens = config.cache_tokens
    if tokens is None:
        wanted = config.max_running * (context_limit(model) or _WITHOUT_LIMIT)
        tokens = min(wanted, int(_memory(model, config.memory) / bytes_per_token(model)))
    return max(1, -(-tokens // config.page_size))


def step_tokens(model: nn.Module, config: EngineConfig) -> int:
    """How many tokens one step may compute: as configured, or what suits the device."""
    if config.tokens_per_step is not None:
        return config.tokens_per_step
    return max(config.max_running, _STEP_TOKENS.get(device_of(model).type, _STEP_TOKENS_ELSEWHERE))


def hands_back(model: nn.Module, config: EngineConfig) -> bool:
    """Whether a pause that begins now gives the cache's memory to the trainer."""
    device = device_of(model)
    if config.release_memory != "auto" or device.type != "cuda":
        return config.release_memory == "always"
    free, total = free_memory(device)
    return free < _PLENTY * total


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, all) bytes of a GPU. What torch holds without using it is free to whoever asks torch."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held, total


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first layer is, and its cache."""
    device: torch.device = unwrapped(model).get_input_embeddings().weight.device
    return device


def bytes_per_token(model: nn.Module) -> int:
    """What one token's keys and values take in all layers."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = unwrapped(model).get_input_embeddings().weight.element_size()
    return int(2 * config.num_hidden_layers * heads * size * element)


def _memory(model: nn.Module, share: float | None) -> float:
    device = device_of(model)
    if device.type == "cuda":
        return (share or _SHARE["cuda"]) * torch.cuda.mem_get_info(device)[0]
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (share or _SHARE["cpu"]) * min([installed, *_container_limits()])


def _container_limits() -> list[int]:
    """What a container's memory is limited to, where it is (cgroups of either version)."""
    files = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    texts = [Path(name).read_text().strip() for name in files if Path(name).is_file()]
    return [int(text) for text in texts if text.isdigit()]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Where kernels are launched meanwhile: Triton's go to the current GPU, whatever their tensors say."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
