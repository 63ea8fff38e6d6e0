"""How much memory the KV cache gets, and what a step may compute: from the config, the model and the device."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from ludus.engine.config import EngineConfig
from ludus.kernels.device import free_memory
from ludus.model.hf_model import context_limit, device_of, head_shape, text_config, unwrapped

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
    if config.keep_kv:
        return False
    if config.release_memory != "auto" or device.type != "cuda":
        return config.release_memory == "always"
    free, total = free_memory(device)
    return free < _PLENTY * total


def bytes_per_token(model: nn.Module) -> int:
    """Bytes of one token's keys and values in all layers."""
    config = text_config(model)
    _, heads, size = head_shape(config)
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
