"""The scorer turns an episode into numbers. Rollouts call this, and nothing else, for rewards.

How a total is made, once and in one place::

    total = Σ weight × score        over outcome rewards
          + Σ reward of each action   (tools' rewards, plus weight × score of per-turn rewards)
          + Σ weight × score        over group rewards, added later by `score_group`

Tools' own per-call rewards are in `Segment.reward` when scoring starts; per-turn rewards are added onto
them there. The parts in `Trajectory.rewards` are unweighted: each outcome reward's parts, each per-turn
reward's sum over the actions, "tools" for tools' rewards, each group reward's score. A score of None adds
nothing; an episode to which nothing was added stays unscored, which is not zero. Everything is computed
before anything is written: a failure leaves the trajectory as it was.

Concurrency: rewards of one episode run at the same time, except those that touch its environments. These run
one after another, because an environment is not made for two callers at once. Those with `runs_last` wait for
the others beside them, because they read what these took. When one reward fails, the others are cancelled,
and the caller sees the first failure.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import Group, GroupReward, Reward, StopReason, Trajectory
from ludus.rewards.reward import (
    STRICTNESS,
    CheckedReward,
    FunctionGroupReward,
    FunctionReward,
    FunctionTurnReward,
    UserFunction,
    call_any,
    current_strictness,
    failure,
    with_retries,
)
from ludus.rewards.scores import (
    TOOLS,
    EvolvingReward,
    Parts,
    RewardTraits,
    ScoreError,
    StatefulReward,
    merge,
    number,
    parse_group_scores,
    parse_parts,
    parse_scores,
    trainable,
)

_SUM = "the sum of all rewards"
T = TypeVar("T")
TurnScores = list[float | None]
RewardLike = Reward | Callable[..., Any]


@runtime_checkable
class TurnReward(Protocol):
    """Scores each action of an episode; the scores are added to the actions' own rewards."""

    @property
    def name(self) -> str: ...

    async def score_turns(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> TurnScores:
        """One score, or None for unscored, for each of `trajectory.actions`."""


def as_reward(thing: RewardLike) -> Reward:
    """`thing` as an outcome reward; a plain function is wrapped."""
    found = as_reward_or_turn_reward(thing)
    if isinstance(found, TurnReward):
        raise ConfigError(f"the per-turn reward {found.name!r} stands alone: it cannot be combined")
    return found


def as_reward_or_turn_reward(thing: RewardLike | TurnReward) -> Reward | TurnReward:
    """`thing` as an outcome or per-turn reward; a plain function becomes an outcome reward."""
    if isinstance(thing, type):
        raise ConfigError(f"{thing.__name__} is a class; give an instance of it: {thing.__name__}(...)")
    if isinstance(thing, FunctionReward | FunctionTurnReward):
        return thing
    if isinstance(thing, GroupReward):
        raise ConfigError(f"{thing!r} scores groups; it belongs among the group rewards")
    if isinstance(thing, Reward | TurnReward):
        return thing
    if callable(thing):
        return FunctionReward(thing)
    raise ConfigError(f"{thing!r} is not a reward: give a function, or an object with name and score")


def as_group_reward(thing: GroupReward | Callable[..., Any]) -> GroupReward:
    """`thing` as a group reward; a plain function is wrapped."""
    if isinstance(thing, type):
        raise ConfigError(f"{thing.__name__} is a class; give an instance of it: {thing.__name__}(...)")
    if isinstance(thing, GroupReward):
        return thing
    if isinstance(thing, Reward | TurnReward):
        raise ConfigError(f"{thing!r} scores single episodes; it belongs among the rewards")
    if callable(thing):
        return FunctionGroupReward(thing)
    raise ConfigError(f"{thing!r} is not a group reward: give a function of `group`")


def weight_of(reward: Reward | TurnReward | GroupReward) -> float:
    """The reward's own weight; 1 where it has none."""
    return number(RewardTraits.of(reward).weight, f"the weight of {reward.name!r}")


def rewards_by_name(rewards: Iterable[Any]) -> dict[str, Any]:
    """All rewards by name, those inside others included; two with one name are refused."""
    found: dict[str, Any] = {}
    for reward in rewards:
        inner = rewards_by_name(RewardTraits.of(reward).children)
        for name, member in [(reward.name, reward), *inner.items()]:
            if found.setdefault(name, member) is not member:
                raise ConfigError(f"two rewards are called {name!r}; give one another name (name='...')")
    return found


async def evaluate(reward: Reward, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
    """The parts of one reward, checked; what the reward raises comes out as `InfraError`."""
    return await _evaluate(
        reward, "score", (trajectory, task, envs), lambda found: parse_parts(found, reward.name)
    )


async def evaluate_turns(
    reward: TurnReward, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
) -> TurnScores:
    """The scores of one per-turn reward, checked."""
    return await _evaluate(
        *(reward, "score_turns", (trajectory, task, envs)),
        lambda found: parse_scores(found, reward.name, trajectory.turns),
    )


async def evaluate_group(reward: GroupReward, group: Group) -> list[float]:
    """One number for each trajectory, checked."""
    return await _evaluate(
        reward, "score_group", (group,), lambda found: parse_group_scores(found, reward.name, group)
    )


async def _evaluate(reward: Any, method: str, args: tuple[Any, ...], parse: Callable[[Any], T]) -> T:
    """Call a scoring method, sync or async, within the reward's timeout, and check what it returns."""
    strictness = current_strictness.get()
    if strictness is not None and isinstance(reward, UserFunction) and takes_strictness(reward):
        reward = reward.using(**{STRICTNESS: strictness})
    score = getattr(reward, method)
    options = {}
    if strictness is not None and STRICTNESS in inspect.signature(score).parameters:
        options = {STRICTNESS: strictness}

    if isinstance(reward, CheckedReward):
        # Checked parts must not be parsed again: if the score is left out, the others would be summed.
        checked: T = await score(*args, **options)
        return checked

    async def call() -> T:
        return parse(await call_any(score, RewardTraits.of(reward).timeout, *args, **options))

    return await with_retries(reward.name, call, function=score)


def takes_strictness(reward: Any) -> bool:
    """Whether a reward has the option: its function does, or a scoring method of its class."""
    if isinstance(reward, UserFunction):
        return STRICTNESS in reward.option_names
    methods = (getattr(reward, name, None) for name in ("score", "score_turns", "score_group"))
    return any(STRICTNESS in inspect.signature(method).parameters for method in methods if method)


async def evaluate_all(
    rewards: Sequence[Reward], trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
) -> list[Parts]:
    """The parts of each reward, in order."""
    return await _concurrently([(r, partial(evaluate, r, trajectory, task, envs)) for r in rewards])


async def _concurrently(calls: Sequence[tuple[Any, Callable[[], Awaitable[T]]]]) -> list[T]:
    """The result of each reward's call; the top of the module says which ones run at the same time."""
    env_lock = asyncio.Lock()
    first = [number for number, (reward, _) in enumerate(calls) if not runs_last(reward)]

    async def run(reward: Any, call: Callable[[], Awaitable[T]]) -> T:
        if runs_last(reward) and first:
            await asyncio.wait([tasks[number] for number in first])
        if not RewardTraits.of(reward).uses_envs:
            return await call()
        async with env_lock:
            return await call()

    tasks = [asyncio.create_task(run(reward, call)) for reward, call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def runs_last(reward: Any) -> bool:
    """Whether a reward, or one that it is made of, waits for the rewards beside it."""
    traits = RewardTraits.of(reward)
    return traits.runs_last or any(map(runs_last, traits.children))


class Scorer:
    """Scores episodes and groups by a set of rewards whose names are all different."""

    def __init__(
        self,
        rewards: Sequence[RewardLike | TurnReward],
        group_rewards: Sequence[GroupReward | Callable[..., Any]] = (),
        *,
        default_total: float | None = None,
    ) -> None:
        """`default_total` is the total of an episode to which nothing was added: 0 where environments alone
        give rewards."""
        self._default_total = default_total
        found = [as_reward_or_turn_reward(thing) for thing in rewards]
        self.rewards: list[Reward] = [r for r in found if not isinstance(r, TurnReward)]
        self.turn_rewards: list[TurnReward] = [r for r in found if isinstance(r, TurnReward)]
        self.group_rewards = [as_group_reward(thing) for thing in group_rewards]
        self._by_name = rewards_by_name([*found, *self.group_rewards])
        self._strictness: float | None = None
        if len({r.name for r in [*found, *self.group_rewards]}) < len(found) + len(self.group_rewards):
            raise ConfigError("a reward is listed twice; it would count twice")

    @property
    def has_rewards(self) -> bool:
        """Whether there is any reward; tools and agents may report rewards beside them."""
        return bool(self._by_name)

    @property
    def names(self) -> list[str]:
        """The names of all rewards, those inside others included."""
        return list(self._by_name)

    async def score(self, trajectory: Trajectory, envs: Mapping[str, Any] | None = None) -> None:
        """Fill in the trajectory's rewards and total, and the rewards of its actions.

        An episode that failed or was aborted stays unscored. Raises `InfraError` when a reward breaks.
        """
        if _is_unfinished(trajectory):
            return
        if trajectory.reward is not None or trajectory.rewards:
            raise ValueError("this trajectory has been scored already; its turns would count twice")
        args = (trajectory, trajectory.task, envs or {})
        outcomes = [(r, partial(evaluate, r, *args)) for r in self.rewards]
        turns = [(r, partial(evaluate_turns, r, *args)) for r in self.turn_rewards]
        scores: list[Any] = await self._run([*outcomes, *turns])
        try:
            self._write(trajectory, scores[: len(outcomes)], scores[len(outcomes) :])
        except ScoreError as error:
            raise failure(_SUM, error) from error

    async def score_group(self, group: Group) -> None:
        """Add the group rewards to the attempts that can be trained on; the others are not even shown.

        With group rewards alone, they are what makes an episode scored.
        """
        alone = not self.rewards and not self.turn_rewards
        shown = [t for t in group.trajectories if t.is_trainable or (alone and not _is_unfinished(t))]
        if not shown or not self.group_rewards:
            return
        if any(reward.name in t.rewards for reward in self.group_rewards for t in shown):
            raise ValueError("this group has been scored already; its attempts would count twice")
        visible = Group(group.task, shown)
        scores = await self._run([(r, partial(evaluate_group, r, visible)) for r in self.group_rewards])
        try:
            self._write_group(shown, scores)
        except ScoreError as error:
            raise failure(_SUM, error) from error

    async def end_step(self, groups: Sequence[Group]) -> None:
        """After the episodes of a training step, and before its update: rewards may change with the policy.

        Those that do have `end_step(groups)`; it changes what later episodes score.
        """
        for reward in self._by_name.values():
            if isinstance(reward, EvolvingReward):
                await reward.end_step(groups)

    @property
    def takes_strictness(self) -> bool:
        """Whether any reward has the option `strictness`, those inside others included."""
        return any(takes_strictness(reward) for reward in self._by_name.values())

    def at_strictness(self, value: float | None) -> Self:
        """A scorer of these rewards, with their state, with another `strictness` for those that have it."""
        other = copy.copy(self)
        other._strictness = value
        return other

    def state_dict(self) -> dict[str, Any]:
        """The state of those rewards that have one, by name."""
        found = self._by_name.items()
        return {
            name: reward.state_dict() for name, reward in found if isinstance(reward, StatefulReward)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; rewards that it does not mention start afresh."""
        for name, own in state.items():
            reward = self._by_name.get(name)
            if not isinstance(reward, StatefulReward):
                raise ConfigError(f"the saved state has {name!r}, which no reward of this run takes")
            reward.load_state_dict(own)

    async def _run(self, calls: Sequence[tuple[Any, Callable[[], Awaitable[T]]]]) -> list[T]:
        token = current_strictness.set(self._strictness)
        try:
            return await _concurrently(calls)
        finally:
            current_strictness.reset(token)

    def _write(
        self, trajectory: Trajectory, outcomes: Sequence[Parts], turns: Sequence[TurnScores]
    ) -> None:
        actions = trajectory.actions
        unshared = {id(one) for one in trajectory.own_segments}
        is_shared = [id(one) not in unshared for one in actions]
        paid = [a.reward for a in actions]
        for turn_reward, scores in zip(self.turn_rewards, turns, strict=True):
            for i, score in enumerate(scores):
                if is_shared[i] and score is not None:  # scored with the attempt that took the action
                    paid[i] = (paid[i] or 0.0) - weight_of(turn_reward) * score
        parts, turn_rewards = turn_totals(paid, self.turn_rewards, turns)
        addends = [trainable(one, "the reward of an action") for one in turn_rewards if one is not None]
        for reward, own in zip(self.rewards, outcomes, strict=True):
            merge(parts, own, reward.name)
            if reward.name in own:
                score = weight_of(reward) * own[reward.name]
                addends.append(trainable(score, f"the score of {reward.name!r}, times its weight,"))
        total = trainable(sum(addends), "the total") if addends else self._default_total
        trajectory.rewards, trajectory.reward = parts, total
        for action, value, shared in zip(actions, turn_rewards, is_shared, strict=True):
            if not shared:
                action.reward = value

    def _write_group(self, shown: Sequence[Trajectory], scores: Sequence[Sequence[float]]) -> None:
        totals = [trajectory.reward or 0.0 for trajectory in shown]
        for reward, values in zip(self.group_rewards, scores, strict=True):
            weight = weight_of(reward)
            totals = [
                trainable(total + weight * value, "the total")
                for total, value in zip(totals, values, strict=True)
            ]
        for trajectory, total, *values in zip(shown, totals, *scores, strict=True):
            trajectory.reward = total
            trajectory.rewards |= {r.name: v for r, v in zip(self.group_rewards, values, strict=True)}


def turn_totals(
    from_tools: Sequence[float | None], rewards: Sequence[TurnReward], scores: Sequence[TurnScores]
) -> tuple[Parts, TurnScores]:
    """The parts that came from single turns, and each action's reward: tools' and per-turn rewards."""
    totals = [None if value is None else number(value, "a tool's reward") for value in from_tools]
    parts: Parts = {}
    for name, values in [(TOOLS, totals), *((r.name, s) for r, s in zip(rewards, scores, strict=True))]:
        given = [value for value in values if value is not None]
        if given:
            parts[name] = sum(given)
    for reward, values in zip(rewards, scores, strict=True):
        weight = weight_of(reward)
        totals = [
            old if new is None else (old or 0.0) + weight * new
            for old, new in zip(totals, values, strict=True)
        ]
    return parts, totals


def _is_unfinished(trajectory: Trajectory) -> bool:
    return trajectory.failure is not None or trajectory.stop is StopReason.ABORTED
