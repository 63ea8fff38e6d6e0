"""A model from a folder in Hugging Face format, and new weights for it in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ludus.core.failures import EngineError

WEIGHTS = "model.safetensors"


def load_model(folder: Path, dtype: str, device: str) -> nn.Module:
    """The folder's causal LM, to be sampled and not to be trained."""
    model = _loaded(folder, getattr(torch, dtype))
    for parameter in model.parameters():
        # aligned, as in the trainer's own model: products round differently on memory that is not
        parameter.data = parameter.data.clone()
    return model.to(device).requires_grad_(False)


@torch.no_grad()
def load_into(model: nn.Module, folder: Path) -> None:
    """Copy a folder's weights into a model, whose parameters stay where they are.

    Everything is checked before the first tensor is copied. Where the file's names are not the module's own (an
    architecture whose checkpoints look different), transformers translates them.
    """
    own = model.state_dict()
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            names = set(file.keys())
            if _covers(names, own):
                for name in names:
                    _check_shape(name, file.get_slice(name).get_shape(), own[name])
                for name in names:
                    own[name].copy_(file.get_tensor(name))
                return
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    other = _loaded(folder, next(model.parameters()).dtype).state_dict()
    if other.keys() != own.keys():
        raise EngineError(f"{folder} has the weights of another model", retriable=False)
    for name, tensor in other.items():
        _check_shape(name, list(tensor.shape), own[name])
    for name, tensor in other.items():
        own[name].copy_(tensor)


def _covers(names: set[str], own: dict[str, Any]) -> bool:
    """Whether these are the module's tensors, all of them; of those that share memory one is enough."""
    if not names <= own.keys():
        return False
    covered = {own[name].data_ptr() for name in names}
    return all(tensor.data_ptr() in covered for tensor in own.values())


def _check_shape(name: str, found: list[int], tensor: torch.Tensor) -> None:
    if list(found) != list(tensor.shape):
        raise EngineError(
            f"the new weights have {name} of shape {list(found)}, and the model one of {list(tensor.shape)}: "
            "nothing was changed",
            retriable=False,
        )


def _loaded(folder: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"the model in {folder} cannot be loaded: {error}", retriable=False) from error
    if missing := sorted(found["missing_keys"]):
        raise EngineError(
            f"the files in {folder} lack {len(missing)} weights, such as {missing[0]}", retriable=False
        )
    loaded: nn.Module = model
    return loaded
