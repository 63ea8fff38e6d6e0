"""How the steps of a run lie in its stages: counted through all of them, from 1."""

from __future__ import annotations

from itertools import accumulate

from ludus.training.checkpoint import Progress
from ludus.training.recipe import Recipe
from ludus.training.settings import MeasurementConfig, RejectionConfig, StageConfig


def steps_of(config: StageConfig) -> int:
    """How many steps a stage has."""
    if isinstance(config, RejectionConfig):
        return config.rounds * config.steps
    return 1 if isinstance(config, MeasurementConfig) else config.steps


def stage_ends(recipe: Recipe) -> set[int]:
    """The steps with which stages that learn end."""
    ends = accumulate(map(steps_of, recipe.stages))
    return {end for end, config in zip(ends, recipe.stages, strict=True) if learns(config)}


def updates_until(progress: Progress, recipe: Recipe) -> int:
    """How often the weights have changed by then: in every step of a stage that learns."""
    steps = [steps_of(config) for config in recipe.stages[: progress.stage]] + [progress.done]
    return sum(count for count, config in zip(steps, recipe.stages, strict=False) if learns(config))


def learns(config: StageConfig) -> bool:
    """Whether a stage changes the weights."""
    return not isinstance(config, MeasurementConfig)
