"""What can be known to be wrong before a run begins: refused then, and not hours later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ludus.core.failures import ConfigError
from ludus.engine.remote import is_address
from ludus.rewards import Scorer
from ludus.training.conversations import read_conversations, read_labelled, read_pairs
from ludus.training.curriculum import DIFFICULTY, STRICTNESS
from ludus.training.models import check_source, device_of
from ludus.training.parts import (
    Parts,
    TaskSetSpec,
    demonstrations_of,
    refuse_stray_tasks,
    task_set_specs,
)
from ludus.training.recipe import ModelConfig, Recipe
from ludus.training.settings import (
    DistillationConfig,
    EvaluationStageConfig,
    PreferenceConfig,
    RejectionConfig,
    RLConfig,
    SFTConfig,
    StageConfig,
    held_out_count,
)
from ludus.training.task_sampler import difficulty_of


def check_parts(recipe: Recipe, parts: Parts) -> None:
    """Refuse what could not be run to its end, or would run and not learn."""
    name = recipe.model.name
    if name is not None and is_address(name):
        raise ConfigError(
            f"model.name = {name!r} is an address, and a model behind a server can be evaluated only (ludus "
            "eval RECIPE -m ADDRESS): to train one, name a folder or a model on the hub"
        )
    device_of(recipe.model)
    _check_tasks(recipe, parts)
    _check_pools(recipe, parts)
    for where, stage in recipe.named_stages:
        _check_stage(stage, where, recipe, parts)
    imitates = any(isinstance(stage, SFTConfig) for stage in recipe.stages)
    if parts.demonstrations is not None and not imitates:
        raise ConfigError(
            "there are demonstrations, but no [warm_start] to imitate them in: add the table (or a "
            '[[stage]] of kind "sft"), or pass warm_start={...}'
        )


def _check_tasks(recipe: Recipe, parts: Parts) -> None:
    refuse_stray_tasks(recipe, parts)
    distills = any(isinstance(stage, DistillationConfig) for stage in recipe.stages)
    is_scored = any(_plays(stage) for stage in recipe.stages)
    if (is_scored or distills) and not (parts.tasks or recipe.task_sets):
        raise ConfigError("there are no tasks to train on: set tasks.train, or pass tasks=")
    if not is_scored:
        return
    shared = bool(parts.rewards or parts.group_rewards)
    # environments pay for steps, which shows only when they are played
    if not (shared or parts.envs or recipe.task_sets):
        raise ConfigError(
            "nothing is rewarded, so nothing can be learned: list rewards, pass rewards=, or let an "
            "environment pay for its steps"
        )
    for one in recipe.task_sets:
        own_envs = parts.envs if one.envs is None else one.envs
        if not (shared or one.rewards or one.group_rewards or own_envs):
            raise ConfigError(
                f"nothing is rewarded in the task set {one.name!r}: list rewards, or its own"
            )


def _check_pools(recipe: Recipe, parts: Parts) -> None:
    known = {*parts.envs, *(name for one in recipe.task_sets for name in one.envs or ())}
    for name in recipe.agent.pools.keys() - known:
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"agent.pools.{name}: there is no environment of that name; there are: {there}"
        )


def _check_stage(stage: StageConfig, where: str, recipe: Recipe, parts: Parts) -> None:
    if isinstance(stage, SFTConfig):
        try:
            shown = demonstrations_of(stage, recipe, parts)
        except ConfigError as error:
            raise ConfigError(f"{where}.demonstrations: {error}") from None
        if isinstance(stage.held_out, str):
            _check_held_out(stage.held_out, stage, where)
        if shown is None or (not callable(shown) and not shown):
            raise ConfigError(
                f'{where} has no demonstrations to imitate: set {where}.demonstrations to "module:function" '
                "or a file, or pass demonstrations="
            )
    if isinstance(stage, PreferenceConfig) and stage.pairs is not None and not _pairs(stage, where):
        raise ConfigError(f"{where}.pairs: {stage.pairs} has no pairs to learn from")
    if isinstance(stage, DistillationConfig):
        try:
            check_source(ModelConfig(name=stage.teacher))
        except ConfigError as error:
            problem = str(error).replace("model.name", f"{where}.teacher")
            raise ConfigError(problem) from None
    if isinstance(stage, RLConfig) and stage.steps:
        _check_curriculum(stage, where, recipe, parts)
    measured = parts.held_out or any(one.evaluation for one in recipe.task_sets)
    if isinstance(stage, EvaluationStageConfig) and not measured:
        raise ConfigError(
            f'{where}, of kind "eval", has nothing to measure on: set tasks.evaluation, or pass held_out='
        )


def _check_held_out(source: str, stage: SFTConfig, where: str) -> None:
    try:
        read_conversations(source, stage.columns)
    except ConfigError as error:
        raise ConfigError(f"{where}.held_out: {error}") from None


def with_step_counts(recipe: Recipe, parts: Parts) -> Recipe:
    """The recipe with a number of steps where it says epochs."""

    def counted(stage: StageConfig) -> StageConfig:
        if not isinstance(stage, SFTConfig) or stage.epochs is None:
            return stage
        shown = demonstrations_of(stage, recipe, parts)
        # an expert plays each of the first set's tasks once
        found = len(task_set_specs(recipe, parts)[0].parts.tasks if callable(shown) else shown)
        learned = found - held_out_count(stage, found)
        steps = max(1, math.ceil(stage.epochs * learned / stage.batch))
        return stage.model_copy(update={"steps": steps, "epochs": None})

    first = None if recipe.warm_start is None else counted(recipe.warm_start)
    return recipe.model_copy(update={"stage": tuple(map(counted, recipe.stage)), "warm_start": first})


def _pairs(stage: PreferenceConfig, where: str) -> Sequence[Any]:
    read = read_labelled if stage.loss == "kto" else read_pairs
    try:
        return read(stage.pairs or "", stage.columns)
    except ConfigError as error:
        raise ConfigError(f"{where}.pairs: {error}") from None


def _check_curriculum(stage: RLConfig, where: str, recipe: Recipe, parts: Parts) -> None:
    """What a curriculum moves must be there: rewards that can be strict, tasks that are easy enough."""
    moved = {
        one.setting: (f"{where}.curriculum.{number}", one.values)
        for number, one in enumerate(stage.curriculum)
    }
    if not moved.keys() & {STRICTNESS, DIFFICULTY}:
        return
    plans = task_set_specs(recipe, parts)
    scorers = (Scorer(plan.parts.rewards, plan.parts.group_rewards) for plan in plans)
    if STRICTNESS in moved and not any(scorer.takes_strictness for scorer in scorers):
        raise ConfigError(
            f"{moved[STRICTNESS][0]} moves {STRICTNESS}, but no reward takes it: give one a keyword-only "
            "parameter `strictness` with a default"
        )
    if DIFFICULTY in moved:
        _check_difficulty(*moved[DIFFICULTY], plans)


def _check_difficulty(place: str, values: Sequence[float], plans: Sequence[TaskSetSpec]) -> None:
    easiest = {plan.name: min(map(difficulty_of, plan.parts.tasks), default=None) for plan in plans}
    if not any("difficulty" in task.metadata for plan in plans for task in plan.parts.tasks):
        raise ConfigError(
            f"{place} moves {DIFFICULTY}, but no task has a difficulty in its metadata: give it to the tasks, "
            "or leave out the curriculum"
        )
    for name, least in easiest.items():
        if least is not None and least > min(values):
            raise ConfigError(
                f"{place}: no task of the set {name!r} has a difficulty of at most {min(values):g}, to which "
                f"the curriculum sets {DIFFICULTY}; the easiest one has {least:g}"
            )


def _plays(stage: StageConfig) -> bool:
    """Whether a stage learns from episodes that are played and scored for it."""
    if isinstance(stage, PreferenceConfig):
        return stage.pairs is None
    return isinstance(stage, RejectionConfig) or (isinstance(stage, RLConfig) and stage.steps > 0)
