"""Where a run's processes live: on this machine, or on the nodes of a cluster; and the engine that samples.

What is asked of a cluster stands here; Ray's answer is in `ludus.dist`, above this room, and is found by its
entry point. With `cluster.tools`, what the recipe names by reference is built on other nodes. What is on a
server already stays there; rewards that touch an environment, remember what they have scored, or follow a
curriculum stay in the run's process.

`start_engine` is where a recipe becomes an engine: the trained module itself, or engines with copies of its
weights. These load what `PolicyWeights` writes: a folder in Hugging Face format, with an adapter merged into
the weights that it adapts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ludus.chat.tokenizers import HFTokenizer
from ludus.core.failures import ConfigError
from ludus.core.generation import Engine
from ludus.core.messages import MediaSpan, ToolSet
from ludus.core.registry import Registry
from ludus.engine import ENGINES, Canary, EngineConfig, EngineSetup
from ludus.engine.replicas import ReplicaLimits, ReplicatedEngine
from ludus.engine.replicas.weights import remove_left_weights
from ludus.model import (
    context_limit,
    images_of,
    unwrapped,
    vocabulary_size,
)
from ludus.rewards.scorer import takes_strictness
from ludus.rewards.scores import RewardTraits, StatefulReward
from ludus.tools import Tool
from ludus.tools.hosting import ToolReference
from ludus.tools.library import tools_named
from ludus.training.config.parts import Parts, has_own_sets
from ludus.training.config.recipe import Recipe, with_absolute_paths
from ludus.training.config.run import launched_rank
from ludus.training.models.loading import device_of
from ludus.training.models.sharded import save_settings
from ludus.training.ranks.processes import RankLauncher
from ludus.training.ranks.steps import Ranks


@dataclass(frozen=True, slots=True)
class HostedParts:
    """Hosted parts of a run, by the references that another node can build them from."""

    tools: list[Any] = field(default_factory=list)
    envs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Environments as `load_served` takes them, by name."""
    rewards: dict[int, Any] = field(default_factory=dict)
    """Rewards, by their place in the recipe."""
    others: list[Any] = field(default_factory=list)
    """The tools that are not hosted."""
    sandbox: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> int:
        """How many hosts there are: of tools, of environments, of rewards."""
        return sum(map(bool, (self.tools, self.envs, self.rewards)))


def hosted_parts(recipe: Recipe, parts: Parts) -> HostedParts:
    """Parts that `cluster.tools` moves to the cluster; others are refused, or stay by a rule."""
    if not recipe.cluster.tools:
        return HostedParts()
    if has_own_sets(recipe):
        raise ConfigError(
            "cluster.tools has one set of tools and environments, and the recipe has [[task_sets]]: serve "
            "theirs with `ludus serve tools` or `ludus serve env`, and name the addresses"
        )
    raw = with_absolute_paths(recipe.model_dump(mode="json"))
    _refuse_objects(recipe, parts)
    tools = [one for one in raw["agent"]["tools"] if not _is_address(one)]
    found = HostedParts(
        tools,
        {name: _served(name, env, recipe) for name, env in raw["agent"]["envs"].items()
         if not _is_address(env)},
        {place: raw["rewards"][place] for place, one in enumerate(parts.rewards) if not _stays(one)},
        [one for one in raw["agent"]["tools"] if _is_address(one)],
        raw["agent"]["sandbox"],
    )  # fmt: skip
    if not found.kinds:
        raise ConfigError(
            f"cluster.tools = {recipe.cluster.tools}, and there is nothing to host: no tool, environment or "
            "reward that is named by reference"
        )
    return found


def _refuse_objects(recipe: Recipe, parts: Parts) -> None:
    objects = [one for one in parts.tools if not isinstance(one, str | Mapping)]
    if (
        objects
        or parts.envs.keys() != recipe.agent.envs.keys()
        or len(parts.rewards) != len(recipe.rewards)
    ):
        what = f": {objects[0]!r:.80}" if objects else ""
        raise ConfigError(
            "cluster.tools builds tools, environments and rewards on other nodes, which objects of this "
            f'process cannot be{what}; name them by reference ("module:name", "file.py:name")'
        )
    for one in tools_named(list(parts.tools)):
        if one.env is not None or (isinstance(one, Tool) and one.signature.env is not None):
            raise ConfigError(
                f"the tool {one.name!r} works on its episode's environment (its parameter 'env'), which "
                "cluster.tools cannot host apart from it: make it a method of the environment"
            )


def _is_address(spec: Any) -> bool:
    name = spec.get("tool") if isinstance(spec, Mapping) else spec
    return str(name).startswith(("http://", "https://"))


def _stays(reward: Any) -> bool:
    return any(
        RewardTraits.of(one).uses_envs or isinstance(one, StatefulReward) or takes_strictness(one)
        for one in [reward, *RewardTraits.of(reward).children]
    )


def _served(name: str, env: str, recipe: Recipe) -> dict[str, Any]:
    settings = recipe.agent.pool(name).model_dump(mode="json")
    settings["size"] = ceil(settings["size"] / recipe.cluster.tools)
    return {"env": env, "name": name, "pool": settings}


def with_hosted(
    recipe: Recipe,
    parts: Parts,
    plan: HostedParts,
    tools: Any,
    envs: Mapping[str, Any],
    rewards: list[Any],
) -> tuple[Recipe, Parts]:
    """The recipe and its parts, with what is hosted in the place of what it stands for.

    The instances of environments are made over there with the recipe's settings; here are their sessions.
    """
    pools = dict(recipe.agent.pools)
    for name in plan.envs:
        here: dict[str, Any] = {"isolation": None, "memory_mb": None, "time_to_live": None}
        here |= {"options": {}, "spares": 0}
        pools[name] = recipe.agent.pool(name).model_copy(update=here)
    agent = recipe.agent.model_copy(update={"pools": pools})
    moved = dict(zip(plan.rewards, rewards, strict=True))
    changed = replace(
        parts,
        tools=[*plan.others, tools] if tools is not None else parts.tools,
        envs={**parts.envs, **envs},
        rewards=[moved.get(place, one) for place, one in enumerate(parts.rewards)],
    )
    return recipe.model_copy(update={"agent": agent}), changed


PLACEMENTS = Registry("placement of processes", group="ludus.placements")
"""Ways to place the processes of a run on several machines, by name."""


class Placement(RankLauncher, Protocol):
    """The places of one run. Closing it ends everything that lives there."""

    def replicas(
        self, dtype: str, engine: EngineConfig, threads: int | None, hang_seconds: float
    ) -> list[Engine]:
        """The engines that were reserved (cluster.engines), not started yet."""

    async def host_tools(self, references: Sequence[ToolReference]) -> ToolSet:
        """Tools that live there (cluster.tools)."""

    async def host_envs(self, envs: Mapping[str, ToolReference]) -> dict[str, Any]:
        """Environments that live there: what makes them, by name."""

    async def host_rewards(self, specs: Sequence[Any], rewards: Sequence[Any]) -> list[Any]:
        """Rewards that are computed there."""

    def report(self, phase: str, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Report the run's progress to `ludus cluster`; called after every step."""

    async def close(self) -> None: ...


def place(recipe: Recipe, run: str, plan: HostedParts) -> Placement | None:
    """Join the recipe's cluster and reserve what it needs there; None where all is on this machine."""
    cluster = recipe.cluster
    if not cluster.is_on_ray:
        return None
    if launched_rank()[1] > 1:
        raise ConfigError(
            "cluster.address and cluster.nodes have Ray start the trainer ranks, and torchrun has started "
            "some: leave out either"
        )
    made: Placement = PLACEMENTS.load("ray")(
        run,
        address=cluster.address,
        nodes=cluster.nodes,
        ranks=cluster.trainer_ranks or 1,
        engines=cluster.engines,
        tools=cluster.tools,
        hosts=plan.kinds,
        gpus=device_of(recipe.model).type == "cuda",
    )
    return made


async def host_parts(
    placement: Placement | None, plan: HostedParts, recipe: Recipe, parts: Parts
) -> tuple[Recipe, Parts]:
    """Start what the plan says, and put it in the place of what it stands for."""
    if placement is None or not plan.kinds:
        return recipe, parts
    references: list[ToolReference] = [*plan.tools, {"sandbox": plan.sandbox}]
    tools = await placement.host_tools(references) if plan.tools else None
    envs = await placement.host_envs(plan.envs) if plan.envs else {}
    chosen = [parts.rewards[place] for place in plan.rewards]
    rewards = await placement.host_rewards([*plan.rewards.values()], chosen) if chosen else []
    return with_hosted(recipe, parts, plan, tools, envs, rewards)


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
    model = ranks.rank0.policy if sampled is None else sampled
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
        self.size = sum(p.numel() * p.element_size() for p in ranks.rank0.policy.parameters())
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
        policy = self._ranks.rank0.policy
        save_settings(folder, policy)
        self._tokenizer.inner.save_pretrained(folder)
        if (images := images_of(policy)) is not None:
            images.save(folder)

    def score(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> list[float]:
        scored: list[float] = self._ranks.perform("score", tuple(tokens), tuple(media))
        return scored
