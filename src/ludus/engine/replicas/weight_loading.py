"""A model from a folder in Hugging Face format, and new weights for it in place."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ludus.core.failures import EngineError
from ludus.model.hf_model import auto_class
from ludus.model.images import ImageProcessor, attach_images

WEIGHTS = "model.safetensors"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def load_model(folder: Path, dtype: str, device: str) -> nn.Module:
    """The folder's causal LM, to be sampled and not to be trained. It sees where the folder has a processor."""
    model = _loaded(folder, getattr(torch, dtype))
    if hasattr(model, "get_image_features") and any(folder.glob("*processor_config.json")):
        attach_images(model, ImageProcessor.load(str(folder)))
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


@torch.no_grad()
def copy_into(model: nn.Module, data: Any) -> bool:
    """The same from the bytes of a safetensors file (anything with a buffer), which are read where they lie.

    False, and nothing is changed, where their names are not the module's own.
    """
    own, found = model.state_dict(), tensors_in(data)
    if not _covers(set(found), own):
        return False
    for name, tensor in found.items():
        _check_shape(name, list(tensor.shape), own[name])
    for name, tensor in found.items():
        own[name].copy_(tensor)
    return True


def tensors_in(data: Any) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, without a copy: they last as long as `data` does, and are read only.

    The format: the length of a header in 8 bytes, the header in JSON (dtype, shape and place of each tensor),
    then the tensors' bytes.
    """
    view = memoryview(data).cast("B")
    begin = 8 + int.from_bytes(view[:8], "little")
    places: dict[str, Any] = json.loads(bytes(view[8:begin]))
    places.pop("__metadata__", None)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they cannot be written to, which nobody does
        for name, place in places.items():
            (start, stop), dtype = place["data_offsets"], _DTYPES[place["dtype"]]
            count = (stop - start) // dtype.itemsize
            flat = torch.frombuffer(view, dtype=dtype, count=count, offset=begin + start)
            found[name] = flat.reshape(place["shape"])
    return found


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
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(str(folder))
        model, found = auto_class(config).from_pretrained(
            str(folder), config=config, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"the model in {folder} cannot be loaded: {error}", retriable=False) from error
    if missing := sorted(found["missing_keys"]):
        raise EngineError(
            f"the files in {folder} lack {len(missing)} weights, such as {missing[0]}", retriable=False
        )
    loaded: nn.Module = model
    return loaded
