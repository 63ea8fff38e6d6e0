"""The trained weights as engines of their own get them: in Hugging Face format, an adapter merged into them.

A sharded model is gathered tensor by tensor: rank 0 writes each one and lets it go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.messages import MediaSpan
from ludus.kernels import on_device, token_logprobs
from ludus.model import (
    PackedContext,
    embedded,
    head_logits,
    hidden_states,
    sampling_mode,
    unwrapped,
)
from ludus.model.image_features import forget_features
from ludus.training.models.gguf import without_progress_bars
from ludus.training.models.lora import is_adapted
from ludus.training.models.sharded import WEIGHTS, is_converted
from ludus.training.models.weight_files import kept_tensors
from ludus.training.optim.logprobs import compute
from ludus.training.optim.shard_files import FileLayout, write_wholes
from ludus.training.optim.sharding import group_of, whole_of


@torch.no_grad()
def write_merged(folder: Path, model: nn.Module) -> None:
    """Write a model's weights into a folder; all ranks call it, and rank 0 writes."""
    forget_features(model)
    group = group_of(model)
    wholes = _wholes(model)
    if group.rank != 0:
        for _ in wholes:
            pass
    elif is_converted(unwrapped(model)):
        state = {name: whole.cpu() for name, whole in wholes}
        with without_progress_bars():
            unwrapped(model).save_pretrained(folder, state_dict=state, max_shard_size=1 << 60)
    else:
        write_wholes(folder / WEIGHTS, FileLayout.of(_bases(model)), wholes)


def _bases(model: nn.Module) -> dict[str, Tensor]:
    """The tensors by their names in the files, those that an adapter is merged into as they are without it."""
    kept = kept_tensors(unwrapped(model))
    return {name.replace(".base_layer.", "."): t for name, t in kept.items() if "lora_" not in name}


def _wholes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each tensor, gathered and merged when it is its turn.

    The model stays as it is. Merged weights are rounded once, to the base's format: engines in float32 sample
    what is trained to the last digits, and those in bfloat16 what it is rounded to.
    """
    group, adapted = group_of(model), dict[str, Any]()
    if is_adapted(model):
        from peft.tuners.lora import LoraLayer

        modules = unwrapped(model).named_modules()
        adapted = {f"{name}.weight": one for name, one in modules if isinstance(one, LoraLayer)}
    for name, tensor in _bases(model).items():
        group.agree()
        yield name, _merged(adapted[name]) if name in adapted else whole_of(tensor.detach())


def _merged(layer: Any) -> Tensor:
    made = copy.deepcopy(layer)
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                whole = whole_of(parameter.detach())
                module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    made.merge()
    weight: Tensor = made.get_base_layer().weight.detach()
    return weight


@torch.no_grad()
def score_tokens(
    model: nn.Module, tokens: Sequence[int], media: Sequence[MediaSpan] = ()
) -> list[float]:
    """The log-probability of each token given those before it; the first one's is 0. All ranks call it."""
    device = next(model.parameters()).device
    with on_device(device), sampling_mode(model):
        return [0.0, *compute(model, _scored, list(tokens), media, device).tolist()]


def _scored(
    model: nn.Module, tokens: list[int], media: Sequence[MediaSpan], device: torch.device
) -> Tensor:
    tokens_T = torch.tensor(tokens, device=device)
    row = PackedContext([len(tokens)], device)
    embedded_TD = embedded(model, tokens_T, media)
    hidden_TD = hidden_states(model, tokens_T, row.position_ids, row, embedded_TD)
    logprobs, _ = token_logprobs(head_logits(model, hidden_TD[:-1]), tokens_T[1:], 1.0)
    return logprobs
