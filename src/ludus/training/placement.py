"""Where a run's processes live: on this machine, or on the nodes of a cluster.

What is asked of a cluster stands here; Ray's answer is in `ludus.dist`, above this room, and is found by its
entry point when a recipe asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ludus.core.failures import ConfigError
from ludus.core.generation import Engine
from ludus.core.messages import ToolSet
from ludus.core.registry import Registry
from ludus.engine import EngineConfig
from ludus.tools.hosting import ToolReference
from ludus.training.config.cluster import launched_rank
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.training.hosting import HostedParts, with_hosted
from ludus.training.models.loading import device_of
from ludus.training.ranks.processes import RankLauncher

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
