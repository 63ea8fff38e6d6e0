"""The model that a stage started from, for those that weigh the distance to it."""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from ludus.core.failures import ConfigError
from ludus.engine import use_ludus_attention
from ludus.observe import atomic_directory
from ludus.training.adapters import adapter_reference, is_adapted
from ludus.training.checkpoint import save_model
from ludus.training.learner import frozen
from ludus.training.models import load_model
from ludus.training.recipe import ModelConfig
from ludus.training.workshop import Workshop


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
