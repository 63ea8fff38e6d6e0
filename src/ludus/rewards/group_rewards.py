"""The library of group rewards: ranks within a group, and bonuses that make a policy try its tools."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.trajectory import Group, Trajectory
from ludus.rewards.conduct import Unit, amount_used, good_calls, made_calls, tool_names
from ludus.rewards.scores import OptionsReward, number


@dataclass(kw_only=True, eq=False)
class Ranking(OptionsReward):
    """From `low` for the last to `high` for the first, evenly spaced; equals share the average.

    Ranked by the total, or by the part called `by` (give that one weight 0 to rank by it alone). With
    `tie_breaker`, equals that took fewer turns, calls or tokens rank higher. An attempt without the part
    ranks below all that have it. A lone attempt gets the middle, as do all when they are equal.
    """

    by: str | None = None
    tie_breaker: Unit | None = None
    low: float = 0.0
    high: float = 1.0
    name: str = "ranking"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tie_breaker not in (None, "turns", "calls", "tokens"):
            raise ConfigError(
                f"{self.name!r}: tie_breaker is turns, calls or tokens, not {self.tie_breaker!r}"
            )

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
    return [rank / (len(keys) - 1) for rank in average_ranks(keys)]


def average_ranks(keys: Sequence[Any]) -> list[float]:
    """The places of keys in their order, from 0; equal ones have the average of theirs."""
    ordered = sorted(keys)
    first = {key: i for i, key in reversed(list(enumerate(ordered)))}
    last = {key: i for i, key in enumerate(ordered)}
    return [(first[key] + last[key]) / 2 for key in keys]


@dataclass(kw_only=True, eq=False)
class Curiosity(OptionsReward):
    """VerlTool's curiosity (F.4, equations 9 to 11): a bonus for tool use where a group seldom uses tools.

    For an attempt y at a task x, beside its other rewards::

        alpha * max(H - RaPR(x), 0) * [y calls a tool] + beta * min(N - n(y), 0)

    RaPR(x) is the share of the attempts at x that call a tool, n(y) the number of calls in y. So the fewer
    attempts use tools, the larger the bonus, and 0 once a share H does (`min_rate`); calls beyond N
    (`max_calls`) cost beta each. Counted are the calls of `tools`, or of any tool, also those that a tool
    answered with an error. The paper has H = 0.3, N = 1, alpha = 0.5, beta = 0.05.

    The penalty can take a right answer below 1: name a reward "success" for metrics to go by.
    """

    tools: Collection[str] | None = None
    alpha: float = 0.5
    beta: float = 0.05
    min_rate: float = 0.3
    max_calls: int = 1
    name: str = "curiosity"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_rate <= 1 or self.max_calls < 0 or self.alpha < 0 or self.beta < 0:
            raise ConfigError(
                f"{self.name!r}: min_rate is between 0 and 1, and alpha, beta and max_calls are at least 0"
            )
        self.tools = tool_names(self.tools, self.name)

    async def score_group(self, group: Group) -> list[float]:
        calls_G = [len(made_calls(trajectory, self.tools)) for trajectory in group.trajectories]
        rate = sum(count > 0 for count in calls_G) / len(calls_G)
        bonus = self.alpha * max(self.min_rate - rate, 0.0)
        return [bonus * (n > 0) + self.beta * min(self.max_calls - n, 0) for n in calls_G]


@dataclass(kw_only=True, eq=False)
class CountBonus(OptionsReward):
    """For each different tool that an attempt used, 1/sqrt(1 + n), where n counts its recent users.

    A count-based bonus, as in Bellemare et al., "Unifying count-based exploration and intrinsic
    motivation" (2016). n is the number of attempts that used the tool, each older group counting
    `decay` times as much as the next. Calling a tool twice counts once, and only calls without any fault
    count, so that inventing names earns nothing. All attempts of a group are scored by the same counts.

    The counts are state: save `state_dict()` with a checkpoint. They depend on the order in which
    groups finish, so that a run with several groups in flight repeats itself only if that order does.
    """

    tools: Collection[str] | None = None
    decay: float = 0.99
    name: str = "count_bonus"
    weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1:
            raise ConfigError(f"{self.name!r}: decay must be above 0 and at most 1, not {self.decay}")
        self.tools = tool_names(self.tools, self.name)
        self.counts: dict[str, float] = {}

    async def score_group(self, group: Group) -> list[float]:
        used = [self._used(trajectory) for trajectory in group.trajectories]
        scores = [math.fsum(self.bonus(name) for name in sorted(names)) for names in used]
        self.counts = {name: count * self.decay for name, count in self.counts.items()}
        for names in used:
            for name in names:
                self.counts[name] = self.counts.get(name, 0.0) + 1.0
        return scores

    def _used(self, trajectory: Trajectory) -> set[str]:
        names = {call.name for call in good_calls(trajectory)}
        return names if self.tools is None else names.intersection(self.tools)

    def bonus(self, tool: str) -> float:
        """The bonus for using this tool now."""
        return 1.0 / math.sqrt(1.0 + self.counts.get(tool, 0.0))

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = state.get("counts")
        if not isinstance(counts, Mapping):
            raise ValueError(f"this is not a state of {self.name!r}: it has no counts")
        self.counts = {
            str(name): number(count, f"the count of {name!r}") for name, count in counts.items()
        }
