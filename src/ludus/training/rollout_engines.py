"""The engine that a run samples from: the trained module itself, or engines with copies of its weights.

`start_engine` is where a recipe becomes an engine. Engines with weights of their own load what `PolicyWeights`
writes: a folder in Hugging Face format, with an adapter merged into the weights that it adapts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ludus.chat.tokenizers import HFTokenizer
from ludus.core.failures import ConfigError
from ludus.core.generation import Engine
from ludus.core.messages import MediaSpan
from ludus.engine import ENGINES, Canary, EngineSetup
from ludus.engine.replicas import ReplicaLimits, ReplicatedEngine
from ludus.engine.replicas.weights import remove_left_weights
from ludus.model import (
    context_limit,
    images_of,
    unwrapped,
    vocabulary_size,
)
from ludus.training.config.recipe import Recipe
from ludus.training.models.sharded import save_settings
from ludus.training.placement import Placement
from ludus.training.ranks.program import Ranks


async def start_engine(
    recipe: Recipe,
    ranks: Ranks,
    sampled: nn.Module | None,
    tokenizer: HFTokenizer,
    version: int,
    placement: Placement | None = None,
) -> Engine:
    """The engine that a recipe asks for; on this machine, trainer ranks have the first devices.

    An engine that shares the trainer's weights samples `sampled`, a whole model: the one that is trained, or a
    copy of it.
    """
    remove_left_weights()
    cluster = recipe.cluster
    model = ranks.program.policy if sampled is None else sampled
    weight = unwrapped(model).get_input_embeddings().weight
    dtype, threads = str(weight.dtype).removeprefix("torch."), recipe.threads
    if placement is not None and cluster.engines:
        threads = threads or (1 if weight.device.type == "cpu" else None)
        engines = placement.replicas(dtype, recipe.engine, threads, cluster.timeout)
    else:
        engines = made_engines(recipe, model, tokenizer, version, ranks.size)
    if engines[0].shares_weights:
        return engines[0]
    images = images_of(model) if all(engine.takes_images for engine in engines) else None
    replicated = ReplicatedEngine(
        engines,
        PolicyWeights(ranks, tokenizer),
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
    PolicyWeights(Ranks.alone(model), tokenizer).write(folder)
    weight = unwrapped(model).get_input_embeddings().weight
    dtype = str(weight.dtype).removeprefix("torch.")
    return WrittenPolicy(folder, dtype, context_limit(model), weight.device.type == "cpu")


class PolicyWeights:
    """The trained model as replicas get it (`WeightSource`): the ranks gather it into a folder."""

    def __init__(self, ranks: Ranks, tokenizer: HFTokenizer) -> None:
        self._ranks, self._tokenizer = ranks, tokenizer
        self.size = sum(p.numel() * p.element_size() for p in ranks.program.policy.parameters())
        self._others: dict[str, bytes] = {}
        """The folder's other files, which stay as they are."""

    def write(self, folder: Path) -> None:
        self._ranks.perform("write_engine_weights", folder)
        if not self._others:
            with tempfile.TemporaryDirectory() as place:
                self._write_others(Path(place))
                self._others = {one.name: one.read_bytes() for one in Path(place).iterdir()}
        for name, data in self._others.items():
            (folder / name).write_bytes(data)

    def _write_others(self, folder: Path) -> None:
        policy = self._ranks.program.policy
        save_settings(folder, policy)
        self._tokenizer.inner.save_pretrained(folder)
        if (images := images_of(policy)) is not None:
            images.save(folder)

    def score(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> list[float]:
        scored: list[float] = self._ranks.perform("score", tuple(tokens), tuple(media))
        return scored
