"""LoRA through peft: small matrices beside a model's own, never merged into them.

The adapted module is sampled and trained as it stands; the engine runs its layers, adapters and all. Only the
adapter's weights are trained and saved. They are float32 whatever the base is, so that small updates are not
lost, and an optimizer needs no second copy of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.model import decoder_of, unwrapped
from ludus.training.config.model import LoraConfig
from ludus.training.models.adapter_folder import (
    WEIGHTS,
    base_of,
    check_base,
    check_complete,
    check_settings,
    fingerprint,
    keeping_the_base,
    read_weights,
    write_base,
)
from ludus.training.optim.shard_files import write_shards
from ludus.training.optim.sharding import group_of, module_of

RANK, ALPHA = 16, 32.0
"""Defaults of a new adapter."""


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is trained through an adapter."""
    return hasattr(module_of(model), "peft_config")


def add_adapter(model: nn.Module, config: LoraConfig, base: str, seed: int) -> nn.Module:
    """The model with a new adapter, which changes nothing yet. `base` is what the model is loaded by."""
    peft = require_peft()
    settings = peft.LoraConfig(
        r=config.rank or RANK,
        lora_alpha=config.alpha or ALPHA,
        lora_dropout=config.dropout,
        target_modules=_targets(model, config),
        task_type="CAUSAL_LM",
    )
    print_of_base = fingerprint(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted: Any = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(f"model.lora: peft cannot adapt {base!r}: {error}") from error
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.base_fingerprint = print_of_base
    return _checked(adapted)


def load_adapter(model: nn.Module, folder: Path, config: LoraConfig | None) -> nn.Module:
    """The base model with the adapter of a folder, ready to be trained further."""
    peft = require_peft()
    weights = read_weights(folder)
    print_of_base = fingerprint(model)
    check_base(print_of_base, folder)
    try:
        settings = peft.LoraConfig.from_pretrained(str(folder))
        check_settings(settings, folder)
        # asked for by a recipe or not at all: an adapter from elsewhere often has some
        settings.lora_dropout = config.dropout if config is not None else 0.0
        with keeping_the_base(weights, model, folder):
            adapted: Any = peft.PeftModel.from_pretrained(
                model, str(folder), config=settings, is_trainable=True
            )
            loaded = peft.set_peft_model_state_dict(adapted, weights)  # again, for the names amiss
    except ConfigError:
        raise
    except Exception as error:  # peft passes on whatever its parts raise
        raise ConfigError(
            f"the adapter in {folder} does not fit its base {base_of(folder)!r}: "
            f"{type(error).__name__}: {str(error).strip():.300}"
        ) from error
    missing, foreign = (
        sorted(name for name in names if "lora_" in name)
        for names in (loaded.missing_keys, loaded.unexpected_keys)
    )
    check_complete(missing, foreign, folder)
    if config is not None:
        _compare(adapted, config, folder)
    adapted.base_fingerprint = print_of_base
    return _checked(adapted)


def _compare(adapted: Any, config: LoraConfig, folder: Path) -> None:
    """Refuse a recipe that says something else about an adapter than it is."""
    settings = adapted.peft_config["default"]
    layers = {n.rpartition(".lora_")[0] for n, _ in adapter_parameters(adapted)}
    found = (settings.r, settings.lora_alpha, {name.rpartition(".")[2] for name in layers})
    named = config.targets != "all-linear"  # which says nothing of a saved one
    targets = {target.rpartition(".")[2] for target in config.targets} if named else found[2]
    if (config.rank or found[0], config.alpha or found[1], targets) != found:
        raise ConfigError(
            f"the adapter in {folder} has rank {found[0]}, alpha {found[1]:g} and the targets "
            f"{', '.join(sorted(found[2]))}, which model.lora does not say: leave them out to take the adapter "
            "as it is"
        )


def save_adapter(folder: Path, model: nn.Module) -> None:
    """Write an adapter as peft reads it; of a sharded one, each rank its parts."""
    adapted: Any = module_of(model)
    settings, group = adapted.peft_config["default"], group_of(model)
    state = require_peft().get_peft_model_state_dict(adapted, save_embedding_layers=False)
    write_shards(folder / WEIGHTS, state, group)
    if group.rank != 0:
        return
    write_base(adapted.base_fingerprint, folder)
    settings.inference_mode = (
        True  # as peft leaves it on disk: a plain load is for use, not for training
    )
    try:
        settings.save_pretrained(str(folder))
    finally:
        settings.inference_mode = False


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapter's own, by name."""
    return ((name, p) for name, p in model.named_parameters() if "lora_" in name)


def _targets(model: nn.Module, config: LoraConfig) -> list[str]:
    """The last parts of the layers' names. The head and the embeddings are left as they are."""
    from transformers.pytorch_utils import Conv1D

    # by what they compute: a router of experts may be a linear layer by name and give something else
    products = (nn.Linear.forward, Conv1D.forward)
    names = {name for name, m in decoder_of(model).named_modules() if type(m).forward in products}
    known = sorted({name.rpartition(".")[2] for name in names})
    if config.targets == "all-linear":
        return known if _is_alone(model) else _within_decoder(model, names)
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"model.lora.targets names {target!r}, and the decoder has no linear layer of that name; "
                f"it has {', '.join(known)}"
            )
    if _is_alone(model):
        return sorted(config.targets)
    chosen = {n for n in names if any(n == t or n.endswith(f".{t}") for t in config.targets)}
    return _within_decoder(model, chosen)


def _is_alone(model: nn.Module) -> bool:
    """Whether no other part, such as a vision tower, could have layers of the decoder's names."""
    return not hasattr(unwrapped(model), "get_image_features")


def _within_decoder(model: nn.Module, names: set[str]) -> list[str]:
    """The whole names of a decoder's layers."""
    decoder = decoder_of(model)
    prefix = next(name for name, module in unwrapped(model).named_modules() if module is decoder)
    return sorted(f"{prefix}.{name}" for name in names)


def _checked(model: nn.Module) -> nn.Module:
    """The adapted model, its base out of training's reach."""
    others = [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    if others:
        raise ConfigError(
            f"the adapter would train {others[0]} and {len(others) - 1} more weights of the base itself "
            "(biases, or modules_to_save); Ludus keeps and saves low-rank matrices alone"
        )
    return model


def require_peft() -> Any:
    """The package; an error that names the extra where it is missing."""
    try:
        import peft
    except ImportError:
        raise MissingExtraError("peft", "lora", "model.lora") from None
    return peft
