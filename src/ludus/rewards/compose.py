"""Rewards made of rewards: weighted sums, gates, tool bonuses, efficiency. They nest, and log every part.

The weight of a reward is applied once, by its owner: the scorer, a sum, or a gate. Logged parts are always
unweighted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import Reward, Trajectory
from ludus.rewards.conduct import Unit, amount_used, good_calls, made_calls, tool_names
from ludus.rewards.declared import RewardTraits
from ludus.rewards.reward import CheckedReward, with_retries
from ludus.rewards.scorer import (
    RewardLike,
    as_reward,
    evaluate,
    evaluate_all,
    rewards_by_name,
    weight_of,
)
from ludus.rewards.scores import Parts, checked_name, checked_weight, merge, number

Envs = Mapping[str, Any]
Scored = tuple[float | None, Parts]
"""The score of a composite reward, and the parts that it came from."""

_CLOSE = 1e-9


class Composite(CheckedReward, ABC):
    """A reward that evaluates others. Subclasses say how in `_score`."""

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"inner"})
    """Which arguments of the constructor are rewards themselves; recipes may nest these."""

    def __init__(self, name: str, children: Sequence[Reward], weight: float = 1.0) -> None:
        self.name = checked_name(name)
        self.weight = checked_weight(weight, name)
        self.children = tuple(children)
        rewards_by_name([self])

    @property
    def uses_envs(self) -> bool:
        return any(RewardTraits.of(child).uses_envs for child in self.children)

    async def score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Parts:
        async def call() -> Parts:
            value, parts = await self._score(trajectory, task, envs)
            own = {} if value is None else {self.name: number(value, f"the score of {self.name!r}")}
            merge(own, parts, self.name)
            return own

        return await with_retries(self.name, call)

    @abstractmethod
    async def _score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Scored:
        """The score, and the parts it came from."""


def weighted_score(reward: Reward, parts: Mapping[str, float]) -> float | None:
    """The weighted score of `reward`, or None when it is unscored."""
    value = parts.get(reward.name)
    return None if value is None else value * weight_of(reward)


class Weighted(Composite):
    """The weighted sum of several rewards. The weights given here replace the rewards' own.

    Unscored rewards add nothing; when all are unscored, so is the sum.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, weights: Mapping[RewardLike, float], *, name: str = "weighted", weight: float = 1.0
    ) -> None:
        pairs = [(as_reward(thing), value) for thing, value in weights.items()]
        if not pairs:
            raise ConfigError(f"{name!r} sums no rewards at all")
        super().__init__(name, [reward for reward, _ in pairs], weight)
        self.weights = [checked_weight(value, r.name) for r, value in pairs]

    async def _score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Scored:
        parts: Parts = {}
        total: float | None = None
        scores = await evaluate_all(self.children, trajectory, task, envs)
        for child, weight, own in zip(self.children, self.weights, scores, strict=True):
            merge(parts, own, child.name)
            if child.name in own:
                total = (total or 0.0) + weight * own[child.name]
        return total, parts


def combine(
    rewards: Sequence[RewardLike], weights: Sequence[float] | None = None, *, name: str = "combined"
) -> Weighted:
    """The sum of `rewards`, by their own weights where none are given."""
    found = [as_reward(thing) for thing in rewards]
    values = [weight_of(reward) for reward in found] if weights is None else list(weights)
    if len(values) != len(found):
        raise ConfigError(f"{name!r}: {len(values)} weights for {len(found)} rewards")
    rewards_by_name(found)
    return Weighted(dict(zip(found, values, strict=True)), name=name)


class Gate(Composite):
    """`inner` where `condition` scores at least `threshold`, and `otherwise` where it does not.

    `otherwise` is a number or another reward. While the gate is shut, `inner` is not evaluated, which saves
    the cost of an expensive judge; with `lazy=False` it is evaluated and logged, but does not count.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"condition", "inner", "otherwise"})

    def __init__(
        self,
        condition: RewardLike,
        inner: RewardLike,
        otherwise: float | RewardLike = 0.0,
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

    async def _score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Scored:
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
        return weighted_score(chosen, own), parts


class FormatGate(Gate):
    """A well-formed episode gets the score of `inner`; a broken format gets a penalty, whatever the answer.

    With r_format the score of `format`, between 0 and 1, Agent-R1 (equation 6) gives::

        r = inner           if r_format = 1
        r = r_format - 1    otherwise

    There, r_format = (the answer is well formed + the syntax of all calls is valid) / 2, which makes -1, -0.5
    or `inner`; the reward `format` with `calls = true` scores it. A number as `penalty` is the score of every
    broken format. `inner` is evaluated either way, so that its part is logged from the start.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"format", "inner"})

    def __init__(
        self,
        format: RewardLike,
        inner: RewardLike,
        penalty: float | Literal["agent_r1"] = "agent_r1",
        *,
        name: str = "format_gate",
        weight: float = 1.0,
    ) -> None:
        if isinstance(penalty, str) and penalty != "agent_r1":
            raise ConfigError(f"{name!r}: penalty is a number or 'agent_r1', not {penalty!r}")
        self.penalty = penalty
        fixed = 0.0 if isinstance(penalty, str) else float(penalty)
        super().__init__(format, inner, fixed, lazy=False, name=name, weight=weight)

    async def _score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Scored:
        value, parts = await super()._score(trajectory, task, envs)
        form = parts.get(self.condition.name)
        if self.penalty == "agent_r1" and form is not None and form < self.threshold - _CLOSE:
            value = form - 1.0
        return value, parts


BonusForm = Literal["agentfly", "verltool", "floor"]


class ToolBonus(Composite):
    """A bonus for tool use, beside the score of `inner` for the answer. Three forms::

        agentfly   r = 0 without a call, max(bonus, inner) with one    (AgentFly, B.1)
        verltool   r = inner + bonus * [a tool was called]             (VerlTool, equation 12)
        floor      r = inner without a call, max(bonus, inner) with one

    With `inner` 1 for a right answer and 0 for a wrong one, AgentFly's form gives 1.0 for a right answer that
    used a tool, 0.1 for a wrong one that did, and 0.0 without any call, right or wrong. `tools` names those
    that earn the bonus; None means any. A call that its tool answers with an error is a call; in the form
    `floor` it earns nothing, nor do the others of its turn. `agentfly` and `floor` keep a negative `inner`.
    """

    def __init__(
        self,
        inner: RewardLike,
        bonus: float = 0.1,
        *,
        form: BonusForm = "agentfly",
        tools: Collection[str] | None = None,
        name: str = "tool_bonus",
        weight: float = 1.0,
    ) -> None:
        if form not in get_args(BonusForm):
            raise ConfigError(f"{name!r}: form is one of {', '.join(get_args(BonusForm))}, not {form!r}")
        self.inner = as_reward(inner)
        self.bonus = number(bonus, f"the bonus of {name!r}")
        self.form = form
        self.tools = tool_names(tools, name)
        super().__init__(name, [self.inner], weight)

    async def _score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Scored:
        parts = await evaluate(self.inner, trajectory, task, envs)
        score = weighted_score(self.inner, parts)
        if score is None:
            return None, parts
        if self.form == "verltool":
            return score + self.bonus * self._used(trajectory), parts
        if score < 0:
            return score, parts
        if self._used(trajectory):
            return max(score, self.bonus), parts
        return 0.0 if self.form == "agentfly" else score, parts

    def _used(self, trajectory: Trajectory) -> bool:
        if self.form != "floor":
            return bool(made_calls(trajectory, self.tools))
        names = {call.name for call in good_calls(trajectory)}
        return bool(names if self.tools is None else names & self.tools)


class Efficiency(Composite):
    """`inner` times a factor: 1 up to `floor`, falling linearly to `lowest` at `budget` and beyond.

    Only a positive score is multiplied: being brief earns nothing by itself, and a penalty is never
    softened. `tokens` are action tokens. The factor is logged as the part `<name>_factor`.
    """

    def __init__(
        self,
        inner: RewardLike,
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
        """The factor for a success that used this much."""
        spent = (used - self.floor) / (self.budget - self.floor)
        return max(self.lowest, 1.0 - (1.0 - self.lowest) * min(max(spent, 0.0), 1.0))

    async def _score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Scored:
        parts = await evaluate(self.inner, trajectory, task, envs)
        score = weighted_score(self.inner, parts)
        if score is None or score <= 0:
            return score, parts
        factor = self.factor(amount_used(trajectory, self.unit))
        merge(parts, {f"{self.name}_factor": factor}, self.name)
        return score * factor, parts
