"""Which of a run's tools, environments and rewards live in the actors of a cluster (`cluster.tools`).

What is named by reference in the recipe can be built on another node; what is on a server already stays there.
Rewards that touch an environment, remember what they have scored, or follow a curriculum stay in the run's
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from ludus.core.failures import ConfigError
from ludus.envs import PoolConfig
from ludus.rewards.scorer import takes_strictness
from ludus.rewards.scores import RewardTraits, StatefulReward
from ludus.tools import Tool
from ludus.tools.library import tools_named
from ludus.training.config.parts import Parts
from ludus.training.config.paths import with_absolute_paths
from ludus.training.config.recipe import Recipe


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
    if recipe.task_sets:
        raise ConfigError(
            "cluster.tools has one set of tools and environments, and the recipe has [[task_sets]]: serve "
            "theirs with `ludus serve tools` or `ludus serve env`, and name the addresses"
        )
    raw = with_absolute_paths(recipe.model_dump(mode="json"))
    _refuse_objects(recipe, parts)
    tools = [one for one in raw["agent"]["tools"] if not _is_address(one)]
    found = HostedParts(
        tools,
        {name: _served(name, env, recipe, parts) for name, env in raw["agent"]["envs"].items()
         if not _is_address(env)},
        {place: raw["rewards"][place] for place, one in enumerate(parts.rewards) if _can_move(one)},
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


def _can_move(reward: Any) -> bool:
    members = [reward, *RewardTraits.of(reward).children]
    return not any(
        RewardTraits.of(one).uses_envs or isinstance(one, StatefulReward) or takes_strictness(one)
        for one in members
    )


def _served(name: str, env: str, recipe: Recipe, parts: Parts) -> dict[str, Any]:
    settings = recipe.agent.pools.get(name, PoolConfig()).model_dump(mode="json")
    settings["size"] = ceil(pool_size(name, recipe, parts) / recipe.cluster.tools)
    return {"env": env, "name": name, "pool": settings}


def pool_size(name: str, recipe: Recipe, parts: Parts) -> int:
    """Most instances of an environment at once."""
    given = recipe.agent.pools.get(name, PoolConfig()).size
    return given or parts.pool_sizes.get(name) or recipe.agent.env_pool


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
        own = pools.get(name, PoolConfig())
        here = {"size": pool_size(name, recipe, parts), "isolation": None, "memory_mb": None}
        pools[name] = own.model_copy(update={**here, "options": {}, "spares": 0, "time_to_live": None})
    agent = recipe.agent.model_copy(update={"pools": pools})
    moved = dict(zip(plan.rewards, rewards, strict=True))
    changed = replace(
        parts,
        tools=[*plan.others, tools] if tools is not None else parts.tools,
        envs={**parts.envs, **envs},
        rewards=[moved.get(place, one) for place, one in enumerate(parts.rewards)],
    )
    return recipe.model_copy(update={"agent": agent}), changed
