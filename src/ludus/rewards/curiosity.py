"""Bonuses for using tools, so that they are tried at all: within a group, or by counts over the run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from ludus.core.failures import ConfigError
from ludus.core.trajectory import Group, Trajectory
from ludus.rewards.compose import tool_names
from ludus.rewards.episode import good_calls, made_calls
from ludus.rewards.function import checked_name, checked_weight
from ludus.rewards.values import number


class Curiosity:
    """VerlTool's curiosity (F.4, equations 9 to 11): pay for tools where a group seldom uses them.

    For an attempt y at a task x, beside its other rewards::

        alpha * max(H - RaPR(x), 0) * [y calls a tool] + beta * min(N - n(y), 0)

    RaPR(x) is the share of the attempts at x that call a tool, n(y) the number of calls in y. So the fewer
    attempts use tools, the more each use pays, and nothing once a share H does (`min_rate`); calls beyond
    N (`max_calls`) cost beta each. Counted are the calls of `tools`, or of any tool, also those that a tool
    answered with an error. The paper has H = 0.3, N = 1, alpha = 0.5, beta = 0.05.

    The price can take a right answer below 1: name a reward "success" for metrics to go by.
    """

    uses_envs = False
    former_options: ClassVar[Mapping[str, str]] = {"decay": "'count_bonus', the bonus by counts"}

    def __init__(
        self,
        *,
        tools: Collection[str] | None = None,
        alpha: float = 0.5,
        beta: float = 0.05,
        min_rate: float = 0.3,
        max_calls: int = 1,
        name: str = "curiosity",
        weight: float = 1.0,
    ) -> None:
        if not 0 <= min_rate <= 1 or max_calls < 0 or alpha < 0 or beta < 0:
            raise ConfigError(
                f"{name!r}: min_rate is between 0 and 1, and alpha, beta and max_calls are at least 0"
            )
        self.name = checked_name(name)
        self.weight = checked_weight(weight, name)
        self.tools = tool_names(tools, name)
        self.alpha, self.beta, self.min_rate, self.max_calls = alpha, beta, min_rate, max_calls

    async def score_group(self, group: Group) -> list[float]:
        calls_G = [len(made_calls(trajectory, self.tools)) for trajectory in group.trajectories]
        rate = sum(count > 0 for count in calls_G) / len(calls_G)
        bonus = self.alpha * max(self.min_rate - rate, 0.0)
        return [bonus * (n > 0) + self.beta * min(self.max_calls - n, 0) for n in calls_G]


class CountBonus:
    """For each different tool that an attempt used, 1/sqrt(1 + n), where n counts its recent users.

    A count-based bonus, as in Bellemare et al., "Unifying count-based exploration and intrinsic
    motivation" (2016). n is the number of attempts that used the tool, each older group counting
    `decay` times as much as the next. Calling a tool twice pays once, and only calls without any fault
    pay, so that inventing names earns nothing. All attempts of a group are scored by the same counts.

    The counts are state: save `state_dict()` with a checkpoint. They depend on the order in which
    groups finish, so that a run with several groups in flight repeats itself only if that order does.
    """

    uses_envs = False

    def __init__(
        self,
        *,
        tools: Collection[str] | None = None,
        decay: float = 0.99,
        name: str = "count_bonus",
        weight: float = 0.1,
    ) -> None:
        if not 0 < decay <= 1:
            raise ConfigError(f"{name!r}: decay must be above 0 and at most 1, not {decay}")
        self.name = checked_name(name)
        self.weight = checked_weight(weight, name)
        self.tools = tool_names(tools, name)
        self.decay = decay
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
        return names if self.tools is None else names & self.tools

    def bonus(self, tool: str) -> float:
        """What using this tool pays now."""
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
