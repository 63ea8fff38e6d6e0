"""The scorer: what turns an episode into numbers. The rollout calls this, and nothing else, for rewards.

How a total is made, once and in one place::

    total = Σ weight × score        over outcome rewards
          + Σ reward of each action   (what tools paid, plus weight × score of per-turn rewards)
          + Σ weight × score        over group rewards, added later by `score_group`

Tools' own per-call rewards are in `Segment.reward` when scoring starts; per-turn rewards are added onto
them there. The parts that `Trajectory.rewards` shows are unweighted: each outcome reward's parts, each
per-turn reward's sum over the actions, "tools" for what tools paid, each group reward's score. A score
of None adds nothing; an episode to which nothing was added at all stays unscored, which is not zero.
Everything is computed before anything is written: a failure leaves the trajectory as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from ludus.core.failures import ConfigError
from ludus.core.trajectory import Group, GroupReward, Reward, StopReason, Trajectory
from ludus.rewards.evaluate import (
    Scoring,
    TurnReward,
    as_scoring,
    at_strictness,
    evaluate,
    evaluate_turns,
    members,
    takes_strictness,
    together,
    weight_of,
)
from ludus.rewards.groups import as_group_reward, evaluate_group
from ludus.rewards.guard import guarded
from ludus.rewards.parameters import current_strictness
from ludus.rewards.values import TOOLS, Parts, merge, number

TurnScores = list[float | None]
T = TypeVar("T")


class Scorer:
    """Scores episodes and groups by a set of rewards whose names are all different."""

    def __init__(
        self,
        rewards: Sequence[Scoring | TurnReward],
        group_rewards: Sequence[GroupReward | Callable[..., Any]] = (),
        *,
        unpaid: float | None = None,
    ) -> None:
        """`unpaid` is the total of an episode to which nothing was added: 0 where environments alone pay."""
        self._unpaid = unpaid
        found = [as_scoring(thing) for thing in rewards]
        self.rewards: list[Reward] = [r for r in found if not isinstance(r, TurnReward)]
        self.turn_rewards: list[TurnReward] = [r for r in found if isinstance(r, TurnReward)]
        self.group_rewards = [as_group_reward(thing) for thing in group_rewards]
        self._members = members([*found, *self.group_rewards])
        self._strictness: float | None = None
        if len({r.name for r in [*found, *self.group_rewards]}) < len(found) + len(self.group_rewards):
            raise ConfigError("a reward is listed twice; it would count twice")

    async def score(self, trajectory: Trajectory, envs: Mapping[str, Any] | None = None) -> None:
        """Fill in the trajectory's rewards and total, and the rewards of its actions.

        An episode that failed or was aborted stays unscored. Raises `InfraError` when a reward breaks.
        """
        if trajectory.failure is not None or trajectory.stop is StopReason.ABORTED:
            return
        if trajectory.reward is not None or trajectory.rewards:
            raise ValueError("this trajectory has been scored already; its turns would be paid twice")
        outcomes, turns = await self._ask(trajectory, envs or {})

        async def written() -> None:
            self._write(trajectory, outcomes, turns)

        await guarded("the sum of all rewards", written)

    async def score_group(self, group: Group) -> None:
        """Add the group rewards to the attempts that can be trained on; the others are not even shown.

        With group rewards alone, they are what makes an episode scored.
        """
        alone = not self.rewards and not self.turn_rewards
        shown = [t for t in group.trajectories if t.is_trainable or (alone and _is_whole(t))]
        if not shown or not self.group_rewards:
            return
        visible = Group(group.task, shown)
        asked = [(reward, partial(_evaluate_group, reward, visible)) for reward in self.group_rewards]
        if any(reward.name in t.rewards for reward, _ in asked for t in shown):
            raise ValueError("this group has been scored already; it would be paid twice")
        scores = await self._together(asked)

        async def written() -> None:
            self._write_group(shown, scores)

        await guarded("the sum of all rewards", written)

    @property
    def takes_strictness(self) -> bool:
        """Whether any reward has the option `strictness`, those inside others included."""
        return any(takes_strictness(reward) for reward in self._members.values())

    def at_strictness(self, value: float | None) -> Self:
        """The same rewards, and the same state, with another `strictness` for those that have it."""
        other = copy.copy(self)
        other._strictness = value
        return other

    def state_dict(self) -> dict[str, Any]:
        """The state of those rewards that have one, by name."""
        stateful = {n: r for n, r in self._members.items() if hasattr(r, "state_dict")}
        return {name: reward.state_dict() for name, reward in stateful.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; rewards that it does not mention start afresh."""
        for name, own in state.items():
            load = getattr(self._members.get(name), "load_state_dict", None)
            if load is None:
                raise ConfigError(f"the saved state has {name!r}, which no reward of this run takes")
            load(own)

    async def _together(self, asked: Sequence[tuple[Any, Callable[[], Awaitable[T]]]]) -> list[T]:
        token = current_strictness.set(self._strictness)
        try:
            return await together(asked)
        finally:
            current_strictness.reset(token)

    async def _ask(
        self, trajectory: Trajectory, envs: Mapping[str, Any]
    ) -> tuple[list[Parts], list[TurnScores]]:
        task = trajectory.task
        outcomes = [(r, partial(evaluate, r, trajectory, task, envs)) for r in self.rewards]
        turns = [(r, partial(evaluate_turns, r, trajectory, task, envs)) for r in self.turn_rewards]
        answers: list[Any] = await self._together([*outcomes, *turns])
        return answers[: len(outcomes)], answers[len(outcomes) :]

    def _write(
        self, trajectory: Trajectory, outcomes: Sequence[Parts], turns: Sequence[TurnScores]
    ) -> None:
        actions = trajectory.actions
        parts, paid = turn_totals([action.reward for action in actions], self.turn_rewards, turns)
        addends = [value for value in paid if value is not None]
        for reward, own in zip(self.rewards, outcomes, strict=True):
            merge(parts, own, reward.name)
            if reward.name in own:
                addends.append(weight_of(reward) * own[reward.name])
        total = number(sum(addends), "the total") if addends else self._unpaid
        trajectory.rewards, trajectory.reward = parts, total
        for action, value in zip(actions, paid, strict=True):
            action.reward = value

    def _write_group(self, shown: Sequence[Trajectory], scores: Sequence[Sequence[float]]) -> None:
        totals = [trajectory.reward or 0.0 for trajectory in shown]
        for reward, values in zip(self.group_rewards, scores, strict=True):
            weight = weight_of(reward)
            totals = [
                number(total + weight * value, "the total")
                for total, value in zip(totals, values, strict=True)
            ]
        for trajectory, total, *values in zip(shown, totals, *scores, strict=True):
            trajectory.reward = total
            trajectory.rewards |= {r.name: v for r, v in zip(self.group_rewards, values, strict=True)}


async def _evaluate_group(reward: GroupReward, group: Group) -> list[float]:
    return await evaluate_group(at_strictness(reward), group)


def turn_totals(
    from_tools: Sequence[float | None], rewards: Sequence[TurnReward], scores: Sequence[TurnScores]
) -> tuple[Parts, TurnScores]:
    """The parts that came from single turns, and what each action is paid in the end."""
    paid = [None if value is None else number(value, "a tool's reward") for value in from_tools]
    parts: Parts = {}
    for name, values in [(TOOLS, paid), *((r.name, s) for r, s in zip(rewards, scores, strict=True))]:
        given = [value for value in values if value is not None]
        if given:
            parts[name] = sum(given)
    for reward, values in zip(rewards, scores, strict=True):
        weight = weight_of(reward)
        paid = [
            old if new is None else (old or 0.0) + weight * new
            for old, new in zip(paid, values, strict=True)
        ]
    return parts, paid


def _is_whole(trajectory: Trajectory) -> bool:
    return trajectory.failure is None and trajectory.stop is not StopReason.ABORTED
