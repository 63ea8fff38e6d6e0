"""Ending a stage early, and the best checkpoint: patience with held-out numbers, and plateaus of tool use.

ZeroTIR follows how often a policy runs code while it learns: as long as that rises, training pays; once it is
flat, the stage can end. Steps, use and accuracy follow power laws, which can be fitted and extrapolated. All of
it is computed from a run's rows of metrics, so that a run that is resumed knows what it knew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.observe import RunFolder
from ludus.training.config.recipe import Recipe, stage_ends
from ludus.training.config.rl import PlateauConfig, RLConfig


def reason_to_end(run: RunFolder, recipe: Recipe, stage: int, start: int, done: int) -> str | None:
    """Why a stage that began after step `start` is over: patience is used up, or a tool's use is flat."""
    config, own = recipe.evaluation, recipe.stages[stage]
    is_measured = config.patience is not None and done and done % config.every == 0
    if is_measured and is_exhausted(run.metrics(), recipe, stage, start):
        return (
            f"evaluation.patience = {config.patience} evaluations brought no better held-out "
            f"{config.best_by}. The best checkpoint is kept"
        )
    if not isinstance(own, RLConfig) or own.plateau is None or done < own.plateau.after:
        return None
    rows = run.metrics()
    values = values_of(rows, own.plateau.metric, max(start, _extended(rows)))[1]
    plateau = find_plateau(values, own.plateau)
    return None if plateau is None else f"rl.plateau: {plateau}"


def _extended(rows: Sequence[Mapping[str, Any]]) -> int:
    """The step after which the run was made longer: it goes on, whatever came before."""
    return max((row["step"] for row in rows if row.get(EXTENDED)), default=0)


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """A held-out number after a step."""

    value: float
    step: int
    reward: float = 0.0
    """What tells equal values apart: while nothing succeeds yet, a rising reward is progress."""

    @property
    def rank(self) -> tuple[float, float, int]:
        """Sort key of evaluations: larger is better; of equal ones the first wins."""
        return self.value, self.reward, -self.step


def held_out_scores(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[HeldOutScore]:
    """The number that marks the best checkpoint, after each step at which a stage was measured.

    From the run's rows of metrics alone, so that a run that is resumed knows what it knew. Stages of kind
    `eval` do not count: they measure with settings of their own, and what they measure has a checkpoint
    before them.
    """
    name = f"eval/{recipe.evaluation.best_by}"
    left_out = stage_ends(recipe, learning=False)
    found = {
        row["step"]: HeldOutScore(float(row[name]), row["step"], float(row.get("eval/reward") or 0.0))
        for row in rows
        if row.get(name) is not None
    }
    return [one for step, one in found.items() if step not in left_out]


def best_of(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> HeldOutScore | None:
    """The highest of them, of equal ones that with the highest reward, then the first.

    The start is the recipe's own model, and does not count.
    """
    trained = [one for one in held_out_scores(rows, recipe) if one.step]
    return max(trained, key=lambda one: one.rank, default=None)


EXTENDED = "extended"
"""The metric that marks a step after which the run was made longer."""


def is_exhausted(rows: Sequence[Mapping[str, Any]], recipe: Recipe, stage: int, start: int) -> bool:
    """Whether a stage that began after step `start` has used up `evaluation.patience`.

    The value it began with is what has to be surpassed first. Evaluations before the run was extended do not
    count against patience.
    """
    patience = recipe.evaluation.patience
    if patience is None or not recipe.stages[stage].can_end_early:
        return False
    within = [one for one in held_out_scores(rows, recipe) if one.step >= start]
    if not within:
        return False
    best = max(within, key=lambda one: one.rank)
    return sum(one.step > max(best.step, _extended(rows)) for one in within) >= patience


def idle_patience(recipe: Recipe) -> str | None:
    """A note where no stage is long enough for `evaluation.patience` to end it; else None."""
    config = recipe.evaluation
    longest = max((one.total_steps for one in recipe.stages if one.can_end_early), default=0)
    if config.patience is None or config.patience * config.every < longest:
        return None
    return (
        f"evaluation.patience = {config.patience} can never end a stage early: so many evaluations, one every "
        f"{config.every} steps, take {config.patience * config.every} steps, and the longest stage of RL, DPO "
        f"or distillation has {longest}. Lower patience or evaluation.every"
    )


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Plateau:
    """A metric that does not rise any more."""

    metric: str
    window: int
    mean: float
    """Over the last `window` steps."""
    rise: float
    """Rise of the fitted line over them, as a share of the mean."""

    def __str__(self) -> str:
        how = "falls" if self.rise < -0.05 else "has stopped rising"
        return (
            f"{self.metric} {how}: over the last {self.window} steps its trend gains {self.rise:+.1%} "
            f"around a mean of {self.mean:.3g}"
        )


def find_plateau(values: Sequence[float], config: PlateauConfig) -> Plateau | None:
    """Whether the last `window` values rise by less than `tolerance` of their mean; None if they do rise."""
    if len(values) < max(config.after, config.window):
        return None
    last = np.asarray(values[-config.window :], dtype=np.float64)
    steps = np.arange(len(last), dtype=np.float64)
    slope = float(np.polyfit(steps, last, 1)[0])
    mean = float(last.mean())
    rise = slope * (len(last) - 1) / mean if mean > 0 else 0.0
    return None if rise > config.tolerance else Plateau(config.metric, config.window, mean, rise)


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """y = scale * x ** exponent, fitted to logarithms by least squares."""

    scale: float
    exponent: float
    r_squared: float
    """Share of the variance of log y that the fit explains."""

    def __call__(self, x: float) -> float:
        return float(self.scale * x**self.exponent)

    def __str__(self) -> str:
        return f"{self.scale:.3g} · step^{self.exponent:.3g} (R² {self.r_squared:.2f})"


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """The fit over the points where both are positive; None for fewer than three."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and b > 0]
    if len({a for a, _ in pairs}) < 3:
        return None
    log_x, log_y = (np.log(np.asarray(column, dtype=np.float64)) for column in zip(*pairs, strict=True))
    exponent, intercept = (float(one) for one in np.polyfit(log_x, log_y, 1))
    total = float(((log_y - log_y.mean()) ** 2).sum())
    left = float(((log_y - intercept - exponent * log_x) ** 2).sum())
    return PowerLaw(float(np.exp(intercept)), exponent, 1.0 - left / total if total > 0 else 1.0)


def values_of(
    rows: Sequence[Mapping[str, Any]], metric: str, start: int, end: int | None = None
) -> tuple[list[int], list[float]]:
    """(steps of the stage from 1 on, values) of a metric; a tool that was not called is not in a row: 0."""
    own = [
        row
        for row in rows
        if row.get("episodes_scored") and row["step"] > start and (end is None or row["step"] <= end)
    ]
    return [row["step"] - start for row in own], [float(row.get(metric) or 0.0) for row in own]


def plateau_report(
    rows: Sequence[Mapping[str, Any]], config: PlateauConfig, start: int, end: int
) -> str:
    """The power laws of tool use and success over a stage, and what they say of twice its steps."""
    lines: list[str] = []
    for metric in (config.metric, "success"):
        steps, values = values_of(rows, metric, start, end)
        law = fit_power_law(steps, values)
        if law is None:
            lines.append(f"- `{metric}`: too few positive values for a fit")
            continue
        ahead = law(2 * steps[-1])
        ahead = min(ahead, 1.0) if metric == "success" else ahead
        lines.append(
            f"- `{metric}` = {law}: {values[-1]:.3g} at step {steps[-1]}, {ahead:.3g} at {2 * steps[-1]} if it "
            "went on like this"
        )
    plateau = find_plateau(values_of(rows, config.metric, start, end)[1], config)
    said = f"{plateau}." if plateau is not None else f"{config.metric} still rises."
    return "\n".join([f"## Tool use\n\n{said} Power laws over the steps of this stage:\n", *lines, ""])
