"""The model that a stage started from, for those that weigh the distance to it."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from ludus.core.failures import ConfigError, LudusError
from ludus.engine import use_ludus_attention
from ludus.observe import atomic_directory
from ludus.training.adapters import AdapterReference, adapter_reference, is_adapted
from ludus.training.checkpoint import save_model
from ludus.training.learner import frozen
from ludus.training.models import load_model
from ludus.training.recipe import ModelConfig
from ludus.training.settings import RLConfig, StageConfig
from ludus.training.workshop import Workshop

SYNCED = "reference.pt"
"""A reference that follows the policy, in a checkpoint."""


def load_reference(workshop: Workshop, folder: Path, is_resumed: bool) -> nn.Module:
    """The weights as they were when the stage began.

    They are written down then, because a resumed run has only later weights. Where there is an adapter, that is
    all that is written, and the reference is the model itself, read with the adapter as it was or with none.
    """
    settings = workshop.recipe.model
    is_new = not folder.exists()
    if is_new and is_resumed:
        raise ConfigError(
            f"{folder} is gone, which held the weights that this stage began with: put it back, or begin a new "
            "run whose model is the last checkpoint's folder"
        )
    if is_new:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(folder) as temporary:
            save_model(temporary, workshop.model, workshop.tokenizer)
    if is_adapted(workshop.model):
        bare = settings.lora is not None and settings.lora.reference == "base"
        return adapter_reference(workshop.model, folder, bare)
    if is_new:
        return frozen(copy.deepcopy(workshop.model))
    config = ModelConfig(name=str(folder), dtype=settings.dtype, device=settings.device)
    model, _ = load_model(config, workshop.recipe.seed)
    use_ludus_attention(model)
    return frozen(model)


def check_sync(workshop: Workshop, config: StageConfig) -> None:
    """Refuse what a reference made of an adapter cannot do, before anything is played."""
    if not isinstance(config, RLConfig) or config.reference_sync is None:
        return
    if not is_adapted(workshop.model):
        return
    lora = workshop.recipe.model.lora
    if lora is not None and lora.reference == "base":
        raise ConfigError(
            'reference_sync lets the reference follow the policy, and model.lora.reference = "base" keeps it '
            'at the model without its adapter: leave out reference_sync, or set model.lora.reference = "start"'
        )
    if config.reference_sync.mixup_alpha != 1:
        raise ConfigError(
            f"reference_sync.mixup_alpha = {config.reference_sync.mixup_alpha:g}: a mixture of two adapters is "
            "no adapter of the same rank (their matrices are multiplied); set mixup_alpha = 1, which copies "
            "the policy's, or train all weights"
        )


@torch.no_grad()
def sync_reference(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """reference = alpha * policy + (1 - alpha) * reference; of an adapter, the policy's as it is.

    Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment", 2024, arXiv:2404.09656.
    """
    if isinstance(reference, AdapterReference):
        reference.follow()
        return
    for own, other in zip(reference.parameters(), policy.parameters(), strict=True):
        own.lerp_(other, alpha)


def save_synced(folder: Path, reference: nn.Module) -> None:
    """Write a reference that may have moved into a checkpoint's folder."""
    if isinstance(reference, AdapterReference):
        torch.save(reference.decoder.weights, folder / SYNCED)
        return
    torch.save({name: p.detach() for name, p in reference.named_parameters()}, folder / SYNCED)


@torch.no_grad()
def load_synced(folder: Path, reference: nn.Module) -> None:
    """Put a reference where the checkpoint left it."""
    path = folder / SYNCED
    if not path.is_file():
        raise LudusError(f"{folder} has no {SYNCED}: it was written by a stage without reference_sync")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(reference, AdapterReference):
        if state is not None:  # else it has not followed yet, and stands for no adapter at all
            reference.follow(state)
        return
    for name, parameter in reference.named_parameters():
        parameter.copy_(state[name])
