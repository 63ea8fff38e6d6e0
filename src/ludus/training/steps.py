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


@dataclass(frozen=True, slots=True)
class Measured:
    """A held-out number after a step."""

    value: float
    step: int
    reward: float = 0.0
    """What tells equal values apart: while nothing succeeds yet, a rising reward is progress."""

    @property
    def rank(self) -> tuple[float, float, int]:
        """Of two evaluations, the better has the larger one; of equal ones the first has it."""
        return self.value, self.reward, -self.step


def measured(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[Measured]:
    """The number that marks the best checkpoint, after each step at which a stage was measured.

    From the run's rows of metrics alone, so that a run that is resumed knows what it knew. Stages of kind
    `eval` do not count: they measure with settings of their own, and what they measure has a checkpoint
    before them.
    """
    name = f"eval/{recipe.evaluation.best_by}"
    ends = accumulate(map(steps_of, recipe.stages))
    left_out = {end for end, config in zip(ends, recipe.stages, strict=True) if not learns(config)}
    found = {
        row["step"]: Measured(float(row[name]), row["step"], float(row.get("eval/reward") or 0.0))
        for row in rows
        if row.get(name) is not None
    }
    return [one for step, one in found.items() if step not in left_out]


def best_of(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> Measured | None:
    """The highest of them, of equal ones that with the highest reward, then the first.

    The start is the recipe's own model, and does not count.
    """
    trained = [one for one in measured(rows, recipe) if one.step]
    return max(trained, key=lambda one: one.rank, default=None)


EXTENDED = "extended"
"""The metric that marks a step after which the run was made longer."""


def is_exhausted(rows: Sequence[Mapping[str, Any]], recipe: Recipe, stage: int, start: int) -> bool:
    """Whether a stage that began after step `start` has used up `evaluation.patience`.

    The value it began with is what has to be surpassed first. Where the run was extended, evaluations before
    that do not count against patience: who extends a stage that has ended early wants it to go on.
    """
    patience = recipe.evaluation.patience
    if patience is None or not _can_end_early(recipe.stages[stage]):
        return False
    within = [one for one in measured(rows, recipe) if one.step >= start]
    if not within:
        return False
    best = max(within, key=lambda one: one.rank)
    extended = max((row["step"] for row in rows if row.get(EXTENDED)), default=0)
    return sum(one.step > max(best.step, extended) for one in within) >= patience


def idle_patience(recipe: Recipe) -> str | None:
    """What to say where no stage is long enough for `evaluation.patience` to end it."""
    config = recipe.evaluation
    longest = max((steps_of(one) for one in recipe.stages if _can_end_early(one)), default=0)
    if config.patience is None or config.patience * config.every < longest:
        return None
    return (
        f"evaluation.patience = {config.patience} can never end a stage early: so many evaluations, one every "
        f"{config.every} steps, take {config.patience * config.every} steps, and the longest stage of RL, DPO "
        f"or distillation has {longest}. Lower patience or evaluation.every"
    )


def _can_end_early(config: StageConfig) -> bool:
    return not isinstance(config, ImitationConfig | RejectionConfig | MeasurementConfig)


def length_key(recipe: Recipe) -> str | None:
    """The key that says how long the last stage is, such as rl.steps; None where it does not learn."""
    where, last = recipe.named_stages[-1]
    if isinstance(last, RejectionConfig):
        return f"{where}.rounds"  # other steps would divide the steps that are done into other rounds
    if isinstance(last, ImitationConfig) and last.epochs is not None:
        return f"{where}.epochs"
    return f"{where}.steps" if learns(last) else None


def check_extension(
    recipe: Recipe, changed: Sequence[str], done: Progress | None, before: Recipe
) -> None:
    """Refuse what a resumed run cannot change: all but how long its last stage is, and what is written down.

    `changed` are the keys, as on the command line; `done` is how far the run has come; `before` is its recipe
    as it was.
    """
    length = length_key(before)
    for key in changed:
        noted = key.startswith(("run.", "evaluation.")) and key != "run.folder"
        if key != length and not noted:
            raise ConfigError(
                "a resumed run goes on by its own recipe, and "
                f"{key} cannot be changed; what can be: {f'{length}, ' if length else ''}"
                f"evaluation.* and run.*. {_OTHERWISE}"
            )
    where, last = recipe.named_stages[-1]
    if isinstance(last, ImitationConfig) and last.epochs is not None:  # its steps depend on the data
        earlier = before.stages[-1]
        assert isinstance(earlier, ImitationConfig)
        if earlier.epochs is not None and last.epochs < earlier.epochs:
            raise ConfigError(f"{length} can only be raised: it is {earlier.epochs:g}")
        return
    if done is not None and done.stage == len(recipe.stages) - 1 and steps_of(last) < done.done:
        raise ConfigError(
            f"{where} has done {done.done} steps already, so its length cannot be {steps_of(last)}"
        )


_OTHERWISE = (
    "To train otherwise, begin a new run whose model is the last checkpoint's folder "
    "(model.name=RUN/checkpoints/step-...)"
)


def finished_text(recipe: Recipe, counted: Recipe, done: Progress | None, run: str) -> str | None:
    """What to say of a run that has done all its steps; None for any other.

    `counted` is the recipe with steps where it says epochs.
    """
    if done is None or done.step < sum(map(steps_of, counted.stages)):
        return None
    text, key = f"{run} is finished: all {done.step} steps are done.", length_key(recipe)
    if key is None:
        return f"{text} Its last stage is an evaluation, so it cannot be extended. {_OTHERWISE}"
    longer = 2 * getattr(recipe.stages[-1], key.rpartition(".")[2])
    return (
        f"{text} To extend it, raise the length of its last stage: "
        f"ludus train --resume {run} {key}={longer}"
    )
