"""The engine that a run samples from: the trained module itself, or engines with copies of its weights.

`start_engine` is where a recipe becomes an engine. Engines with weights of their own load what `PolicyWeights`
writes: a folder in Hugging Face format, with an adapter merged into the weights that it adapts. The first
folder is written by transformers. The later ones have the same tensors at the same places, so that only their
bytes are written: one copy in memory.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludus.chat.tokenizers import HFTokenizer
from ludus.core.failures import ConfigError
from ludus.core.generation import Engine
from ludus.core.messages import MediaSpan
from ludus.engine import ENGINES, Canary, EngineSetup
from ludus.engine.replicas import ReplicaLimits, ReplicatedEngine
from ludus.engine.replicas.weights import WEIGHTS, SafetensorsLayout, remove_left_weights
from ludus.kernels import on_device, token_logprobs
from ludus.model import (
    PackedContext,
    context_limit,
    embedded,
    head_logits,
    hidden_states,
    images_of,
    sampling_mode,
    unwrapped,
    vocabulary_size,
)
from ludus.model.image_features import forget_features
from ludus.training.config.recipe import Recipe
from ludus.training.models.gguf import without_progress_bars
from ludus.training.models.lora import is_adapted
from ludus.training.placement import Placement


async def start_engine(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: HFTokenizer,
    version: int,
    trainer_ranks: int,
    placement: Placement | None = None,
) -> Engine:
    """The engine that a recipe asks for; on this machine, `trainer_ranks` processes have the first devices."""
    remove_left_weights()
    cluster = recipe.cluster
    weight = unwrapped(model).get_input_embeddings().weight
    dtype, threads = str(weight.dtype).removeprefix("torch."), recipe.threads
    if placement is not None and cluster.engines:
        threads = threads or (1 if weight.device.type == "cpu" else None)
        engines = placement.replicas(dtype, recipe.engine, threads, cluster.timeout)
    else:
        engines = made_engines(recipe, model, tokenizer, version, trainer_ranks)
    if engines[0].shares_weights:
        return engines[0]
    images = images_of(model) if all(engine.takes_images for engine in engines) else None
    replicated = ReplicatedEngine(
        engines,
        PolicyWeights(model, tokenizer),
        Canary.of(vocabulary_size(model), context_limit(model), dtype, images),
        version=version,
        limits=ReplicaLimits(seconds=cluster.timeout),
        folder=None if cluster.weights is None else Path(cluster.weights),
    )
    await replicated.open()
    return replicated


def made_engines(
    recipe: Recipe, model: nn.Module, tokenizer: HFTokenizer, version: int, trainer_ranks: int
) -> list[Engine]:
    """The engines of `cluster.engine`, not started: one for each server, or as many as `cluster.engines`.

    Those that run on this machine have a GPU each, behind the trainer's, or one thread each on the host.
    """
    cluster = recipe.cluster
    chosen = "vllm" if cluster.servers else "process" if cluster.engines else "embedded"
    name = cluster.engine or chosen
    make = ENGINES.load(name)
    weight = unwrapped(model).get_input_embeddings().weight
    device, here = weight.device, int(os.environ.get("LOCAL_WORLD_SIZE", trainer_ranks))
    if device.type == "cuda" and torch.cuda.device_count() < here + cluster.engines:
        raise ConfigError(
            f"cluster.engines = {cluster.engines} and {here} trainer process(es) need a GPU each, and this "
            f"machine has {torch.cuda.device_count()}: lower them, or leave out cluster.engines to sample on "
            "the trainer's"
        )
    own_device = device.type == "cuda" and cluster.engines > 0
    engines: list[Engine] = []
    for number in range(len(cluster.servers) or cluster.engines or 1):
        setup = EngineSetup(
            model=model,
            tokenizer=tokenizer,
            config=recipe.engine,
            version=version,
            number=number,
            address=cluster.servers[number] if cluster.servers else None,
            device=f"{device.type}:{here + number}" if own_device else str(device),
            dtype=str(weight.dtype).removeprefix("torch."),
            threads=recipe.threads or (1 if device.type == "cpu" else None),
            seconds=cluster.timeout,
        )
        engines.append(make(setup))
    if engines[0].shares_weights and (cluster.servers or cluster.engines):
        raise ConfigError(
            f"cluster.engine = {name!r} samples the trainer's own module, in its process: leave out "
            "cluster.engines and cluster.servers"
        )
    return engines


@dataclass(frozen=True, slots=True)
class WrittenPolicy:
    """A model in a folder, as a server of its own is started with it."""

    folder: Path
    dtype: str
    context: int | None
    on_cpu: bool


def write_policy(model: nn.Module, tokenizer: HFTokenizer, folder: Path) -> WrittenPolicy:
    """Write a model as replicas get it: an adapter is merged."""
    folder.mkdir(parents=True, exist_ok=True)
    PolicyWeights(model, tokenizer).write(folder)
    weight = unwrapped(model).get_input_embeddings().weight
    dtype = str(weight.dtype).removeprefix("torch.")
    return WrittenPolicy(folder, dtype, context_limit(model), weight.device.type == "cpu")


class PolicyWeights:
    """The trained model as replicas get it (`WeightSource`)."""

    def __init__(self, model: nn.Module, tokenizer: HFTokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.size = sum(p.numel() * p.element_size() for p in model.parameters())
        self._layout: SafetensorsLayout | None = None
        self._is_first = True
        self._others: dict[str, bytes] = {}
        """The folder's other files, which stay as they are."""

    @torch.no_grad()
    def write(self, folder: Path) -> None:
        forget_features(self._model)
        state = merged_state(self._model)
        if self._layout is not None:
            for name, data in self._others.items():
                (folder / name).write_bytes(data)
            self._layout.write(folder / WEIGHTS, state)
            return
        with without_progress_bars():
            unwrapped(self._model).save_pretrained(folder, state_dict=state, max_shard_size=1 << 60)
        self._tokenizer.inner.save_pretrained(folder)
        if (images := images_of(self._model)) is not None:
            images.save(folder)
        if self._is_first:
            self._is_first = False
            self._layout = SafetensorsLayout.of(folder / WEIGHTS, state)
            others = [file for file in folder.iterdir() if file.is_file() and file.name != WEIGHTS]
            self._others = {file.name: file.read_bytes() for file in others}

    @torch.no_grad()
    def score(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> list[float]:
        model, device = self._model, next(self._model.parameters()).device
        with on_device(device), sampling_mode(model):
            tokens_T = torch.tensor(list(tokens), device=device)
            row = PackedContext([len(tokens)], device)
            embedded_TD = embedded(model, tokens_T, media)
            hidden_TD = hidden_states(model, tokens_T, row.position_ids, row, embedded_TD)
            logprobs, _ = token_logprobs(head_logits(model, hidden_TD[:-1]), tokens_T[1:], 1.0)
        return [0.0, *logprobs.tolist()]


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by their names in Hugging Face format; an adapter is merged into what it adapts.

    The model stays as it is. Merged weights are rounded once, to the base's format: engines in float32 sample
    what is trained to the last digits, and those in bfloat16 what it is rounded to.
    """
    inner = unwrapped(model)
    state: dict[str, Tensor] = inner.state_dict()
    if not is_adapted(model):
        return state
    from peft.tuners.lora import LoraLayer

    found = {name: t for name, t in state.items() if "lora_" not in name}
    for name, layer in inner.named_modules():
        if isinstance(layer, LoraLayer):
            merged: Any = copy.deepcopy(layer)
            merged.merge()
            found[f"{name}.base_layer.weight"] = merged.get_base_layer().weight.detach()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in found.items()}
