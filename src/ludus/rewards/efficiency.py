"""Efficiency: of two successes, the shorter one pays more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.compose import Composite, counted
from ludus.rewards.evaluate import Scoring, as_reward, evaluate
from ludus.rewards.values import Parts, merge

Unit = Literal["turns", "calls", "tokens"]


class Efficiency(Composite):
    """`inner` times a factor: 1 up to `floor`, falling linearly to `lowest` at `budget` and beyond.

    Only a positive score is multiplied: being brief never pays by itself, and a penalty is never
    softened. `tokens` are those the model said. The factor is shown as the part `<name>_factor`.
    """

    def __init__(
        self,
        inner: Scoring,
        budget: float,
        *,
        floor: float = 1,
        unit: Unit = "turns",
        lowest: float = 0.5,
        name: str = "efficiency",
        weight: float = 1.0,
    ) -> None:
        if unit not in get_args(Unit):
            raise ConfigError(f"{name!r}: unit is one of {', '.join(get_args(Unit))}, not {unit!r}")
        if not 0 <= floor < budget:
            raise ConfigError(f"{name!r}: 0 <= floor < budget must hold; floor {floor}, budget {budget}")
        if not 0 <= lowest <= 1:
            raise ConfigError(f"{name!r}: lowest must be between 0 and 1, not {lowest}")
        self.inner = as_reward(inner)
        self.budget, self.floor, self.unit, self.lowest = float(budget), float(floor), unit, lowest
        super().__init__(name, [self.inner], weight)

    def factor(self, used: float) -> float:
        """What a success that used this much is multiplied by."""
        spent = (used - self.floor) / (self.budget - self.floor)
        return max(self.lowest, 1.0 - (1.0 - self.lowest) * min(max(spent, 0.0), 1.0))

    async def _score(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> tuple[float | None, Parts]:
        parts = await evaluate(self.inner, trajectory, task, envs)
        score = counted(self.inner, parts)
        if score is None or score <= 0:
            return score, parts
        factor = self.factor(amount_used(trajectory, self.unit))
        merge(parts, {f"{self.name}_factor": factor}, self.name)
        return score * factor, parts


def amount_used(trajectory: Trajectory, unit: Unit) -> int:
    """How many turns, calls or tokens an episode took."""
    if unit == "turns":
        return trajectory.turns
    if unit == "calls":
        return len(trajectory.calls)
    return sum(len(action.tokens) for action in trajectory.actions)
