"""Task sets from what a recipe says about them. What a set leaves out, it shares with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ludus.rollouts.runner import Rollout
from ludus.tools import shut
from ludus.training.parts import Parts, resolve_part
from ludus.training.recipe import Recipe
from ludus.training.task_sets import TaskSet, TaskSetConfig

ONLY = "tasks"
"""What the set of a recipe without task sets is called."""


Build = Callable[[Recipe, Parts], Rollout]
"""Builds the rollout that a recipe and its parts describe: `workshop.build_rollout` on one engine."""


def build_task_sets(recipe: Recipe, parts: Parts, build: Build) -> list[TaskSet]:
    """The task sets of a run; for a recipe that names none, the one that it describes itself."""
    base = build(recipe, parts)
    if not recipe.task_sets:
        return [TaskSet(ONLY, 1.0, parts.tasks, parts.held_out, base)]
    return [_build(recipe, config, parts, base, build) for config in recipe.task_sets]


async def close_task_sets(sets: Sequence[TaskSet]) -> None:
    """Close the environments and tools of all sets, those they share once. Not the engine, nor sandboxes."""
    pools = {id(pool): pool for one in sets for pool in one.rollout.pools.values()}
    tools = {id(one.rollout.tools): one.rollout.tools for one in sets}
    await asyncio.gather(*(pool.close() for pool in pools.values()))
    for shared in tools.values():
        await shut(shared)


def recipe_of(recipe: Recipe, config: TaskSetConfig) -> Recipe:
    """The recipe as it would be if this set were the only one."""
    agent = {name: getattr(config, name) for name in ("tools", "envs", "system")}
    own: dict[str, Any] = {name: getattr(config, name) for name in ("rewards", "group_rewards")}
    own["agent"] = recipe.agent.model_copy(update=_given(agent))
    own["tasks"] = recipe.tasks.model_copy(
        update={"train": config.train, "evaluation": config.evaluation}
    )
    if config.budgets is not None:
        limits = {name: getattr(config.budgets, name) for name in config.budgets.model_fields_set}
        own["budgets"] = recipe.budgets.model_copy(update=limits)
    return recipe.model_copy(update={**_given(own), "task_sets": ()})


def _build(
    recipe: Recipe,
    config: TaskSetConfig,
    parts: Parts,
    base: Rollout,
    build: Build,
) -> TaskSet:
    own_recipe = recipe_of(recipe, config)
    named = {name: getattr(config, name) for name in ("tools", "envs", "rewards", "group_rewards")}
    named |= {"tasks": config.train, "held_out": config.evaluation}
    changes = {name: resolve_part(name, value, own_recipe) for name, value in _given(named).items()}
    own = replace(parts, **{"held_out": [], **changes})
    rollout = build(own_recipe, own)
    observed = own_recipe.budgets.max_observation_tokens == base.budgets.max_observation_tokens
    if config.envs is None:
        rollout.pools = base.pools
    if config.tools is None and observed:  # tools cut their results at that budget
        rollout.tools = base.tools
    if config.rewards is None and config.group_rewards is None:
        rollout.scorer = base.scorer
    return TaskSet(config.name, config.weight, own.tasks, own.held_out, rollout)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
