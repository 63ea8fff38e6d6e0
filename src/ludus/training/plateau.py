"""Ending a stage of RL when the use of a tool has stopped growing, and what its growth would lead to.

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

from ludus.training.config.rl import PlateauConfig

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
