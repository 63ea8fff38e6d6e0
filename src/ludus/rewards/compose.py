"""Rewards made of rewards: weighted sums, gates, tool bonuses, efficiency. They nest, and log every part.

The weight of a reward is applied once, by its owner: the scorer, a sum, or a gate. Logged parts are always
unweighted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import Reward, Trajectory
from ludus.rewards.conduct import Unit, amount_used, good_calls, made_calls, tool_names
from ludus.rewards.reward import CheckedReward, with_retries
from ludus.rewards.scorer import (
    RewardLike,
    as_reward,
    evaluate,
    evaluate_all,
    rewards_by_name,
    weight_of,
)
from ludus.rewards.scores import OptionsReward, Parts, RewardTraits, checked_weight, merge, number

Envs = Mapping[str, Any]
Scored = tuple[float | None, Parts]
"""The score of a composite reward, and the parts that it came from."""

_CLOSE = 1e-9


@dataclass(kw_only=True, eq=False)
class Composite(OptionsReward, CheckedReward, ABC):
    """A reward that evaluates others, which are options of it. Subclasses say how in `_score`.

    A plain function in the place of a reward is wrapped.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"inner"})
    """Which options are rewards themselves; recipes may nest these."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.children = self._rewards()
        self.uses_envs = any(RewardTraits.of(child).uses_envs for child in self.children)
        rewards_by_name([self])

    def _rewards(self) -> tuple[Reward, ...]:
        """The rewards among the options, in order; a number or None in the place of one stays."""
        found: list[Reward] = []
        for option in fields(self):
            given = getattr(self, option.name)
            if option.name in self.takes_rewards and not isinstance(given, int | float | None):
                found.append(as_reward(given))
                setattr(self, option.name, found[-1])
        return tuple(found)

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


@dataclass(kw_only=True, eq=False)
class Weighted(Composite):
    """The weighted sum of several rewards. The weights given here replace the rewards' own.

    Unscored rewards add nothing; when all are unscored, so is the sum.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset()

    weights: Mapping[RewardLike, float] = field(kw_only=False)
    name: str = "weighted"

    def _rewards(self) -> tuple[Reward, ...]:
        if not self.weights:
            raise ConfigError(f"{self.name!r} sums no rewards at all")
        pairs = [(as_reward(thing), value) for thing, value in self.weights.items()]
        self._weights = [checked_weight(value, reward.name) for reward, value in pairs]
        return tuple(reward for reward, _ in pairs)

    async def _score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Scored:
        parts: Parts = {}
        total: float | None = None
        scores = await evaluate_all(self.children, trajectory, task, envs)
        for child, weight, own in zip(self.children, self._weights, scores, strict=True):
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


@dataclass(kw_only=True, eq=False)
class Gate(Composite):
    """`inner` where `condition` scores at least `threshold`, and `otherwise` where it does not.

    `otherwise` is a number or another reward. While the gate is shut, `inner` is not evaluated, which saves
    the cost of an expensive judge; with `lazy=False` it is evaluated and logged, but does not count.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"condition", "inner", "otherwise"})

    condition: Reward = field(kw_only=False)
    inner: Reward = field(kw_only=False)
    otherwise: float | Reward = field(default=0.0, kw_only=False)
    threshold: float = 1.0
    lazy: bool = True
    name: str = "gate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.otherwise, int | float):
            self.otherwise = number(self.otherwise, f"what {self.name!r} gives otherwise")

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


@dataclass(kw_only=True, eq=False)
class FormatGate(Composite):
    """A well-formed episode gets the score of `inner`; a broken format gets a penalty, whatever the answer.

    With r_format the score of `format`, between 0 and 1, Agent-R1 (equation 6) gives::

        r = inner           if r_format = 1
        r = r_format - 1    otherwise

    There, r_format = (the answer is well formed + the syntax of all calls is valid) / 2, which makes -1, -0.5
    or `inner`; the reward `format` with `calls = true` scores it. A number as `penalty` is the score of every
    broken format. `inner` is evaluated either way, so that its part is logged from the start.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"format", "inner"})

    format: Reward = field(kw_only=False)
    inner: Reward = field(kw_only=False)
    penalty: float | Literal["agent_r1"] = field(default="agent_r1", kw_only=False)
    name: str = "format_gate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.penalty, str):
            self.penalty = number(self.penalty, f"the penalty of {self.name!r}")

    async def _score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Scored:
        parts = await evaluate(self.format, trajectory, task, envs)
        form = parts.get(self.format.name)
        if form is None:
            return None, parts
        own = await evaluate(self.inner, trajectory, task, envs)
        merge(parts, own, self.inner.name)
        if form >= 1.0 - _CLOSE:
            return weighted_score(self.inner, own), parts
        return form - 1.0 if isinstance(self.penalty, str) else self.penalty, parts


@dataclass(kw_only=True, eq=False)
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

    inner: Reward = field(kw_only=False)
    bonus: float = field(default=0.1, kw_only=False)
    form: Literal["agentfly", "verltool", "floor"] = "agentfly"
    tools: Collection[str] | None = None
    name: str = "tool_bonus"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bonus = number(self.bonus, f"the bonus of {self.name!r}")
        self.tools = tool_names(self.tools, self.name)

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
        return bool(names if self.tools is None else names.intersection(self.tools))


@dataclass(kw_only=True, eq=False)
class Efficiency(Composite):
    """`inner` times a factor: 1 up to `floor`, falling linearly to `lowest` at `budget` and beyond.

    Only a positive score is multiplied: being brief earns nothing by itself, and a penalty is never
    softened. `tokens` are action tokens. The factor is logged as the part `<name>_factor`.
    """

    inner: Reward = field(kw_only=False)
    budget: float = field(kw_only=False)
    floor: float = 1
    unit: Unit = "turns"
    lowest: float = 0.5
    name: str = "efficiency"

    def __post_init__(self) -> None:
        super().__post_init__()
        name, floor, budget = self.name, self.floor, self.budget
        if not 0 <= floor < budget:
            raise ConfigError(f"{name!r}: 0 <= floor < budget must hold; floor {floor}, budget {budget}")
        if not 0 <= self.lowest <= 1:
            raise ConfigError(f"{name!r}: lowest must be between 0 and 1, not {self.lowest}")

    def factor(self, used: float) -> float:
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
