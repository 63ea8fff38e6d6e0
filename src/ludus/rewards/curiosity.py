"""Curiosity: pay for the tools that are seldom used, so that they are tried at all."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.trajectory import Group, Trajectory
from ludus.rewards.episode import good_calls
from ludus.rewards.function import checked_name, checked_weight
from ludus.rewards.values import number


class Curiosity:
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
        name: str = "curiosity",
        weight: float = 0.1,
    ) -> None:
        if not 0 < decay <= 1:
            raise ConfigError(f"{name!r}: decay must be above 0 and at most 1, not {decay}")
        if isinstance(tools, str):
            raise ConfigError(f"{name!r}: tools is a list of names, not the text {tools!r}")
        self.name = checked_name(name)
        self.weight = checked_weight(weight, name)
        self.tools = None if tools is None else frozenset(tools)
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
