"""How the steps of a run lie in its stages: counted through all of them, from 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ludus.core.failures import ConfigError
from ludus.training.recipe import Recipe
from ludus.training.settings import (
    ImitationConfig,
    MeasurementConfig,
    RejectionConfig,
    StageConfig,
)

if TYPE_CHECKING:
    from ludus.training.checkpoint import Progress


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


@dataclass(frozen=True, slots=True, order=True)
class Measured:
    """A held-out number after a step."""

    value: float
    step: int


def measured(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[Measured]:
    """The number that marks the best checkpoint, after each step at which a stage was measured.

    From the run's rows of metrics alone, so that a run that is resumed knows what it knew. Stages of kind
    `eval` do not count: they measure with settings of their own, and what they measure has a checkpoint
    before them.
    """
    name = f"eval/{recipe.evaluation.best_by}"
    ends = accumulate(map(steps_of, recipe.stages))
    left_out = {end for end, config in zip(ends, recipe.stages, strict=True) if not learns(config)}
    found = {row["step"]: float(row[name]) for row in rows if row.get(name) is not None}
    return [Measured(value, step) for step, value in found.items() if step not in left_out]


def best_of(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> Measured | None:
    """The highest of them, of equal ones the first. The start is the recipe's own model, and does not count."""
    trained = [one for one in measured(rows, recipe) if one.step]
    return max(trained, key=lambda one: (one.value, -one.step), default=None)


def is_exhausted(rows: Sequence[Mapping[str, Any]], recipe: Recipe, stage: int, start: int) -> bool:
    """Whether a stage that began after step `start` has used up `evaluation.patience`.

    The value it began with is what has to be surpassed first.
    """
    patience = recipe.evaluation.patience
    if patience is None or isinstance(
        recipe.stages[stage], ImitationConfig | RejectionConfig | MeasurementConfig
    ):
        return False
    within = [one for one in measured(rows, recipe) if one.step >= start]
    if not within:
        return False
    best = max(within, key=lambda one: (one.value, -one.step))
    return sum(one.step > best.step for one in within) >= patience


def check_extension(recipe: Recipe, changed: Sequence[str], done: Progress | None) -> None:
    """Refuse what a resumed run cannot change: all but how long its last stage is, and what is written down.

    `changed` are the keys, as on the command line; `done` is how far the run has come.
    """
    where, last = recipe.named_stages[-1]
    lengths = (f"{where}.steps", f"{where}.rounds")
    for key in changed:
        noted = key.startswith(("run.", "evaluation.")) and key != "run.folder"
        if key not in lengths and not noted:
            raise ConfigError(
                "a resumed run goes on by its own recipe, and "
                f"{key} cannot be changed; what can be: {where}.steps, "
                "evaluation.* and run.*. To train otherwise, begin a new run whose model is the last "
                "checkpoint's folder (model.name=RUN/checkpoints/step-...)"
            )
    if done is not None and done.stage == len(recipe.stages) - 1 and steps_of(last) < done.done:
        raise ConfigError(
            f"{where} has done {done.done} steps already, so its length cannot be {steps_of(last)}"
        )


def finished_text(recipe: Recipe, done: Progress | None, run: str) -> str | None:
    """What to say of a run that has done all its steps; None for any other."""
    if done is None or done.step < sum(map(steps_of, recipe.stages)):
        return None
    where, last = recipe.named_stages[-1]
    return (
        f"{run} is finished: all {done.step} steps are done. To extend it, raise the length of its last stage: "
        f"ludus train --resume {run} {where}.steps={2 * getattr(last, 'steps', 1)}"
    )
