"""`@group_reward`: a plain Python function that scores all attempts at a task together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, overload

from ludus.core.failures import ConfigError
from ludus.core.trajectory import Group, GroupReward
from ludus.rewards.evaluate import ask
from ludus.rewards.function import UserFunction
from ludus.rewards.guard import DEFAULT_TIMEOUT, guarded
from ludus.rewards.values import ScoreError, turns_of


class FunctionGroupReward(UserFunction):
    """A group reward made of a function."""

    known: ClassVar[Sequence[str]] = ("group", "trajectories", "task")

    async def score_group(self, group: Group) -> list[float]:
        values = {"group": group, "trajectories": group.trajectories, "task": group.task}
        wanted = {name: values[name] for name in self.parameters.wanted}

        async def call() -> list[float]:
            return _checked(await self._call(wanted), self.name, group)

        return await guarded(self.name, call, retries=self.retries, function=self.function)


def as_group_reward(thing: GroupReward | Callable[..., Any]) -> GroupReward:
    """`thing` as a group reward; a plain function is wrapped."""
    if isinstance(thing, type):
        raise ConfigError(f"{thing.__name__} is a class; give an instance of it: {thing.__name__}(...)")
    if hasattr(thing, "name") and hasattr(thing, "score_group"):
        return thing
    if hasattr(thing, "score") or hasattr(thing, "score_turns"):
        raise ConfigError(f"{thing!r} scores single episodes; it belongs among the rewards")
    if callable(thing):
        return FunctionGroupReward(thing)
    raise ConfigError(f"{thing!r} is not a group reward: give a function of `group`")


async def evaluate_group(reward: GroupReward, group: Group) -> list[float]:
    """One number for each trajectory, checked; what the reward raises comes out as `InfraError`."""

    async def call() -> list[float]:
        return _checked(await ask(reward, reward.score_group, group), reward.name, group)

    return await guarded(reward.name, call, function=reward.score_group)


def _checked(values: Any, name: str, group: Group) -> list[float]:
    scores = [s for s in turns_of(values, name, len(group.trajectories), "attempts") if s is not None]
    if len(scores) != len(group.trajectories):
        raise ScoreError(f"{name!r} left an attempt unscored; a group reward scores all it is shown")
    return scores


@overload
def group_reward(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    weight: float = 1.0,
    timeout: float | None = DEFAULT_TIMEOUT,
    retries: int = 0,
) -> FunctionGroupReward: ...
@overload
def group_reward(
    *,
    name: str | None = None,
    weight: float = 1.0,
    timeout: float | None = DEFAULT_TIMEOUT,
    retries: int = 0,
) -> Callable[[Callable[..., Any]], FunctionGroupReward]: ...
def group_reward(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Make a group reward of a sync or async function, with or without parentheses.

    It takes any of `group`, `trajectories`, `task`, by name, and returns one number per attempt, in
    order. It is shown only attempts that can be trained on; failed ones have no score to give.
    """
    if function is None:
        return partial(FunctionGroupReward, **settings)
    return FunctionGroupReward(function, **settings)
