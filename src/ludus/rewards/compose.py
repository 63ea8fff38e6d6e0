"""Rewards made of rewards: sums, gates, partial credit. They nest, and keep every part visible by name.

The weight of a reward is applied once, by whatever it is handed to: the scorer, a sum, or a gate. The
parts that are shown are always the unweighted ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from ludus.core.failures import ConfigError
from ludus.core.protocols import Reward
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.episode import good_calls
from ludus.rewards.evaluate import Scoring, as_reward, evaluate, evaluate_all, members, weight_of
from ludus.rewards.function import checked_name, checked_weight
from ludus.rewards.guard import SelfGuarded, guarded
from ludus.rewards.values import Parts, merge, number

_CLOSE = 1e-9


class Composite(SelfGuarded, ABC):
    """A reward that asks others. Subclasses say how in `_score`."""

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"inner"})
    """Which arguments of the constructor are rewards themselves; recipes may nest these."""

    def __init__(self, name: str, children: Sequence[Reward], weight: float = 1.0) -> None:
        self.name = checked_name(name)
        self.weight = checked_weight(weight, name)
        self.children = tuple(children)
        members([self])

    @property
    def uses_envs(self) -> bool:
        return any(getattr(child, "uses_envs", True) for child in self.children)

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        async def call() -> Parts:
            value, parts = await self._score(trajectory, task, envs)
            own = {} if value is None else {self.name: number(value, f"the score of {self.name!r}")}
            merge(own, parts, self.name)
            return own

        return await guarded(self.name, call)

    @abstractmethod
    async def _score(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> tuple[float | None, Parts]:
        """What counts, and the parts it came from."""


def counted(reward: Reward, parts: Mapping[str, float]) -> float | None:
    """What `reward` adds to a sum: its own part times its own weight, or None when it is unscored."""
    value = parts.get(reward.name)
    return None if value is None else value * weight_of(reward)


class Weighted(Composite):
    """The weighted sum of several rewards. The weights given here replace the rewards' own.

    Unscored rewards add nothing; when all are unscored, so is the sum.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, weights: Mapping[Scoring, float], *, name: str = "weighted", weight: float = 1.0
    ) -> None:
        pairs = [(as_reward(thing), value) for thing, value in weights.items()]
        if not pairs:
            raise ConfigError(f"{name!r} sums no rewards at all")
        super().__init__(name, [reward for reward, _ in pairs], weight)
        self.weights = [checked_weight(value, r.name) for r, value in pairs]

    async def _score(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> tuple[float | None, Parts]:
        parts: Parts = {}
        total: float | None = None
        scores = await evaluate_all(self.children, trajectory, task, envs)
        for child, weight, own in zip(self.children, self.weights, scores, strict=True):
            merge(parts, own, child.name)
            if child.name in own:
                total = (total or 0.0) + weight * own[child.name]
        return total, parts


def combine(
    rewards: Sequence[Scoring], weights: Sequence[float] | None = None, *, name: str = "combined"
) -> Weighted:
    """The sum of `rewards`, by their own weights where none are given."""
    found = [as_reward(thing) for thing in rewards]
    values = [weight_of(reward) for reward in found] if weights is None else list(weights)
    if len(values) != len(found):
        raise ConfigError(f"{name!r}: {len(values)} weights for {len(found)} rewards")
    members(found)
    return Weighted(dict(zip(found, values, strict=True)), name=name)


class Gate(Composite):
    """`inner` where `condition` scores at least `threshold`, and `otherwise` where it does not.

    `otherwise` is a number or another reward. While the gate is shut, `inner` is not asked at all, which
    saves the price of a judge; with `lazy=False` it is asked and shown, but does not count.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"condition", "inner", "otherwise"})

    def __init__(
        self,
        condition: Scoring,
        inner: Scoring,
        otherwise: float | Scoring = 0.0,
        *,
        threshold: float = 1.0,
        lazy: bool = True,
        name: str = "gate",
        weight: float = 1.0,
    ) -> None:
        self.condition, self.inner = as_reward(condition), as_reward(inner)
        self.otherwise: float | Reward
        if isinstance(otherwise, int | float):
            self.otherwise = number(otherwise, f"what {name!r} gives otherwise")
        else:
            self.otherwise = as_reward(otherwise)
        self.threshold, self.lazy = threshold, lazy
        branches = [self.condition, self.inner, self.otherwise]
        super().__init__(name, [b for b in branches if not isinstance(b, float)], weight)

    async def _score(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> tuple[float | None, Parts]:
        parts = await evaluate(self.condition, trajectory, task, envs)
        verdict = parts.get(self.condition.name)
        if verdict is None:
            return None, parts
        is_open = verdict >= self.threshold - _CLOSE
        chosen = self.inner if is_open else self.otherwise
        if not is_open and not self.lazy:
            merge(parts, await evaluate(self.inner, trajectory, task, envs), self.inner.name)
        if isinstance(chosen, float):
            return chosen, parts
        own = await evaluate(chosen, trajectory, task, envs)
        merge(parts, own, chosen.name)
        return counted(chosen, own), parts


class FormatGate(Gate):
    """A broken format is a fixed penalty; a well-formed episode gets what `inner` says.

    As in Agent-R1: the correct answer in the wrong form is worth no more than a wrong one. `inner` is
    asked either way, so that its part can be followed from the start of training.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"format", "inner"})

    def __init__(
        self,
        format: Scoring,
        inner: Scoring,
        penalty: float = -1.0,
        *,
        name: str = "format_gate",
        weight: float = 1.0,
    ) -> None:
        super().__init__(format, inner, float(penalty), lazy=False, name=name, weight=weight)


class ToolBonus(Composite):
    """Partial credit for having used a tool although the answer is wrong, as AgentFly pays it.

    A score from 0 up to `bonus` is raised to `bonus` when at least one call went through; a better score
    stays as it is, and so does a penalty. `tools` names those that earn the credit; None means any.
    """

    def __init__(
        self,
        inner: Scoring,
        bonus: float = 0.1,
        *,
        tools: Collection[str] | None = None,
        name: str = "tool_bonus",
        weight: float = 1.0,
    ) -> None:
        self.inner = as_reward(inner)
        self.bonus = number(bonus, f"the bonus of {name!r}")
        if isinstance(tools, str):
            raise ConfigError(f"{name!r}: tools is a list of names, not the text {tools!r}")
        self.tools = None if tools is None else frozenset(tools)
        super().__init__(name, [self.inner], weight)

    async def _score(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> tuple[float | None, Parts]:
        parts = await evaluate(self.inner, trajectory, task, envs)
        score = counted(self.inner, parts)
        if score is None or score < 0:
            return score, parts
        names = {call.name for call in good_calls(trajectory)}
        used = bool(names if self.tools is None else names & self.tools)
        return max(score, self.bonus) if used else score, parts
