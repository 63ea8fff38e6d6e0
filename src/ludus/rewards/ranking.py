"""Relative ranking: how good an attempt is among the attempts at the same task."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.core.failures import ConfigError
from ludus.core.trajectory import Group, Trajectory
from ludus.rewards.efficiency import Unit, amount_used
from ludus.rewards.function import checked_name, checked_weight


class Ranking:
    """From `low` for the last to `high` for the first, evenly spaced; equals share the average.

    Ranked by the total, or by the part called `by` (give that one weight 0 to rank by it alone). With
    `tie_breaker`, equals that took fewer turns, calls or tokens rank higher. An attempt without the part
    ranks below all that have it. A lone attempt gets the middle, as does everybody when all are equal.
    """

    uses_envs = False

    def __init__(
        self,
        *,
        by: str | None = None,
        tie_breaker: Unit | None = None,
        low: float = 0.0,
        high: float = 1.0,
        name: str = "ranking",
        weight: float = 1.0,
    ) -> None:
        if tie_breaker not in (None, "turns", "calls", "tokens"):
            raise ConfigError(f"{name!r}: tie_breaker is turns, calls or tokens, not {tie_breaker!r}")
        self.name = checked_name(name)
        self.weight = checked_weight(weight, name)
        self.by, self.tie_breaker, self.low, self.high = by, tie_breaker, low, high

    async def score_group(self, group: Group) -> list[float]:
        keys = [self._key(trajectory) for trajectory in group.trajectories]
        return [self.low + (self.high - self.low) * rank for rank in normalised_ranks(keys)]

    def _key(self, trajectory: Trajectory) -> tuple[float, float]:
        value = trajectory.reward if self.by is None else trajectory.rewards.get(self.by)
        used = 0 if self.tie_breaker is None else amount_used(trajectory, self.tie_breaker)
        return (float("-inf") if value is None else value, -used)


def normalised_ranks(keys: Sequence[tuple[float, ...]]) -> list[float]:
    """0 for the lowest key, 1 for the highest, equal keys averaged; 0.5 for a single one."""
    if len(keys) < 2:
        return [0.5] * len(keys)
    ordered = sorted(keys)
    first = {key: i for i, key in reversed(list(enumerate(ordered)))}
    last = {key: i for i, key in enumerate(ordered)}
    return [(first[key] + last[key]) / 2 / (len(keys) - 1) for key in keys]
