"""Where a run's processes live: on this machine, or on the nodes of a cluster.

What is asked of a cluster stands here; Ray's answer is in `ludus.dist`, above this room, and is found by its
entry point. With `cluster.tools`, what the recipe names by reference is built on other nodes. What is on a
server already stays there; rewards that touch an environment, remember what they have scored, or follow a
curriculum stay in the run's process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Protocol

from ludus.core.failures import ConfigError
from ludus.core.generation import Engine
from ludus.core.messages import ToolSet
from ludus.core.registry import Registry
from ludus.engine import EngineConfig
from ludus.rewards.scorer import takes_strictness
from ludus.rewards.scores import RewardTraits, StatefulReward
from ludus.tools import Tool
from ludus.tools.hosting import ToolReference
from ludus.tools.library import tools_named
from ludus.training.config.parts import Parts, has_own_sets
from ludus.training.config.recipe import Recipe
from ludus.training.config.recipe_files import with_absolute_paths
from ludus.training.config.run import launched_rank
from ludus.training.models.loading import device_of
from ludus.training.ranks.processes import RankLauncher


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
