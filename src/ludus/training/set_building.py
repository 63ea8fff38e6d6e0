"""Task sets from what a recipe says about them. What a set leaves out, it shares with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludus.core.failures import ConfigError
from ludus.rollouts.runner import Rollout
from ludus.tools import shut
from ludus.training.parts import Parts, resolve_named
from ludus.training.recipe import Recipe
from ludus.training.task_sets import TaskSet, TaskSetConfig

ONLY = "tasks"
"""What the set of a recipe without task sets is called."""


Build = Callable[[Recipe, Parts], Rollout]
"""Builds the rollout that a recipe and its parts describe: `workshop.build_rollout` on one engine."""


@dataclass(frozen=True, slots=True)
class SetPlan:
    """A task set before anything is built for it."""

    name: str
    recipe: Recipe
    """The recipe as it would be if this set were the only one."""
    parts: Parts
    """The code of such a recipe."""
    config: TaskSetConfig | None = None
    """What the recipe's table says; None for a recipe without such tables."""

    @property
    def limits(self) -> dict[str, float]:
        """The budgets that the set's own table gives."""
        own = self.config.budgets if self.config is not None else None
        return {} if own is None else {name: getattr(own, name) for name in own.model_fields_set}


def plans_of(recipe: Recipe, parts: Parts) -> list[SetPlan]:
    """The task sets of a recipe, loaded; for one that names none, the one that it describes itself."""
    refuse_stray_tasks(recipe, parts)
    if not recipe.task_sets:
        return [SetPlan(ONLY, recipe, parts)]
    return [_plan(recipe, config, parts) for config in recipe.task_sets]


def refuse_stray_tasks(recipe: Recipe, parts: Parts) -> None:
    """Tasks that were passed beside task sets would be played by nobody."""
    if recipe.task_sets and (parts.tasks or parts.held_out):
        raise ConfigError(
            "the recipe has [[task_sets]], which bring their own tasks: leave out tasks= and held_out="
        )


def build_task_sets(recipe: Recipe, parts: Parts, build: Build) -> list[TaskSet]:
    """The task sets of a run, with what they share built once."""
    base = build(recipe, parts)
    plans = plans_of(recipe, parts)
    return [_build(plan, base, build) for plan in plans]


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
    record = recipe.agent.record
    if record is not None and config.tools is not None:
        # in one store, the tools of one set must not be taken for another's
        agent["record"] = record.model_copy(update={"name": f"{record.name}/{config.name}"})
    own: dict[str, Any] = {name: getattr(config, name) for name in ("rewards", "group_rewards")}
    own["agent"] = recipe.agent.model_copy(update=_given(agent))
    own["tasks"] = recipe.tasks.model_copy(
        update={name: getattr(config, name) for name in ("train", "evaluation", "columns")}
    )
    if config.budgets is not None:
        limits = {name: getattr(config.budgets, name) for name in config.budgets.model_fields_set}
        own["budgets"] = recipe.budgets.model_copy(update=limits)
    return recipe.model_copy(update={**_given(own), "task_sets": ()})


def _plan(recipe: Recipe, config: TaskSetConfig, parts: Parts) -> SetPlan:
    own_recipe = recipe_of(recipe, config)
    named = {name: getattr(config, name) for name in ("tools", "envs", "rewards", "group_rewards")}
    named |= {"tasks": config.train, "held_out": config.evaluation}
    changes = {
        name: resolve_named(f"the task set {config.name!r}", name, value, own_recipe)
        for name, value in _given(named).items()
    }
    own = replace(parts, **{"held_out": [], **changes})
    return SetPlan(config.name, own_recipe, own, config)


def _build(plan: SetPlan, base: Rollout, build: Build) -> TaskSet:
    config, own = plan.config, plan.parts
    if config is None:
        return TaskSet(plan.name, 1.0, own.tasks, own.held_out, base)
    rollout = build(plan.recipe, own)
    observed = plan.recipe.budgets.max_observation_tokens == base.budgets.max_observation_tokens
    if config.envs is None:
        rollout.pools = base.pools
    if config.tools is None and observed:  # tools cut their results at that budget
        rollout.tools = base.tools
    if config.rewards is None and config.group_rewards is None:
        rollout.scorer = base.scorer
    return TaskSet(plan.name, config.weight, own.tasks, own.held_out, rollout, plan.limits)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
