"""Whether a run's model fits into a device, and what would make it fit: the estimate, put to a recipe."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ludus.core.failures import LudusError
from ludus.core.messages import Json
from ludus.kernels.device import all_memory
from ludus.training.config.run import LoraConfig, ModelConfig
from ludus.training.models.loading import (
    device_of,
    dtype_of,
    read_config,
    source_of,
    written_config,
)
from ludus.training.models.lora import base_of, is_adapter
from ludus.training.optim.estimate import (
    GIB,
    USABLE,
    Load,
    Memory,
    ModelSize,
    checkpointed_for,
    model_size,
    training_memory,
)

if TYPE_CHECKING:
    from ludus.training.config.recipe import Recipe

log = logging.getLogger(__name__)

EPISODE = 8192
"""Tokens of the longest row, where no recipe says it."""
_SHORTEST = 1024
"""Rows shorter than this are no advice."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to train on a device."""

    size: ModelSize
    load: Load
    memory: Memory
    cache: int
    """Bytes that are left for the KV cache while sampling."""
    longest: int
    """Tokens of the longest row that it is for."""
    change: str = ""
    """What has to be set for it; empty where the recipe stays as it is."""


def config_of(model: ModelConfig) -> tuple[Any, Json]:
    """The Hugging Face configuration of a model that a recipe names, and what its file says of it."""
    name = str(model.name)
    folder = str(base_of(Path(name)) if is_adapter(Path(name)) else source_of(name))
    return read_config(folder, trust=model.trust_remote_code), written_config(folder)


def loads_of(recipe: Recipe) -> list[tuple[str, Load]]:
    """What each stage that learns asks for, by the key of its table."""
    made: list[tuple[str, Load]] = []
    for where, stage in recipe.named_stages:
        optimizer = getattr(stage, "optimizer", None)
        if optimizer is None or not stage.total_steps:
            continue
        kl = getattr(stage, "kl", None)
        measures = stage.kind == "dpo" or (kl is not None and kl.weight > 0)
        load = Load(tokens=optimizer.micro_batch_tokens, optimizer=optimizer.name, reference=measures)
        made.append((where, load))
    return made


def plans_for(
    config: Any,
    dtype: torch.dtype,
    lora: LoraConfig | None,
    load: Load,
    longest: int,
    device_bytes: int,
    *,
    on_gpu: bool = True,
) -> Iterator[Plan]:
    """Ways to fit into a device, the least change first; none where nothing fits.

    Passes are made smaller and layers are computed again, as `plan_micro_batches` does by itself: neither is
    a change. Then come an adapter and moments in 8 bits, and where these do not help, shorter rows.
    """
    found = False
    wholes: list[tuple[str, LoraConfig | None, Load]] = [("", lora, load)]
    if lora is None:
        wholes.append(("model.lora = { rank = 16 }", LoraConfig(rank=16), load))
        if load.optimizer == "adamw" and on_gpu:
            smaller = replace(load, optimizer="adamw_8bit")
            wholes.append(('optimizer.name = "adamw_8bit"', None, smaller))
    for change, adapter, asked in wholes:
        size = model_size(config, dtype, adapter, on_gpu=on_gpu)
        for tokens in (asked.tokens, max(4096, longest), longest):
            if tokens > asked.tokens and tokens != longest:
                continue
            told = checkpointed_for(size, replace(asked, tokens=tokens), device_bytes, on_gpu=on_gpu)
            if told is None:
                continue
            memory = training_memory(size, told, device_bytes if on_gpu else None)
            cache = int(USABLE * device_bytes) - memory.resident
            if cache > longest * size.token_bytes:
                yield Plan(size, told, memory, cache, longest, change)
                found = True
                break
    half = longest // 2
    if not found and half >= _SHORTEST:
        shorter = replace(load, tokens=min(load.tokens, half))
        for plan in plans_for(config, dtype, lora, shorter, half, device_bytes, on_gpu=on_gpu):
            row = f"budgets.max_tokens = {plan.longest}"
            ways = (plan.change,) if row in plan.change else (plan.change, row)
            yield replace(plan, change=" and ".join(way for way in ways if way))


def memory_note(recipe: Recipe) -> str | None:
    """A warning where a run's model does not fit into the device's memory, by the estimate."""
    model = recipe.model
    if model.name is None or (recipe.cluster.trainer_ranks or 1) > 1:
        return None
    device = device_of(model)
    dtype, longest = dtype_of(model, device), recipe.budgets.max_tokens
    on_gpu, memory = device.type == "cuda", all_memory(device)
    try:
        config, _ = config_of(model)
        for where, load in loads_of(recipe):
            plans = plans_for(config, dtype, model.lora, load, longest, memory, on_gpu=on_gpu)
            if (first := next(plans, None)) is not None and not first.change:
                continue
            size = model_size(config, dtype, model.lora, on_gpu=on_gpu)
            least = replace(load, tokens=longest, checkpointed=size.costs.layers)
            need = training_memory(size, least, memory if on_gpu else None).peak
            changes = [first.change, *(plan.change for plan in plans)] if first is not None else []
            instead = f"set {' or '.join(changes)}" if changes else "take a smaller model"
            return (
                f"{where}: {model.name} needs about {need / GIB:.1f} GiB to be trained, and {device} has "
                f"{memory / GIB:.1f}: {instead} (ludus check model {model.name} says more)"
            )
    except (LudusError, OSError, ValueError, RuntimeError) as error:
        log.debug("no estimate of memory: %s", error)  # loading it will tell
    return None
