"""Asking rewards for their scores: the one place that calls `score`.

Who waits for whom. Rewards of one episode run at the same time, except those that touch its
environments: these run one after another, because an environment is not made for two callers at once.
When one reward fails, the others are cancelled, and the first failure is what the caller sees.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from ludus.core.concurrency import run_sync
from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import GroupReward, Reward, Trajectory
from ludus.rewards.function import FunctionReward, FunctionTurnReward, UserFunction
from ludus.rewards.guard import DEFAULT_TIMEOUT, SelfGuarded, guarded, in_time
from ludus.rewards.parameters import STRICTNESS, current_strictness
from ludus.rewards.values import Parts, number, parts_of, turns_of

T = TypeVar("T")


@runtime_checkable
class TurnReward(Protocol):
    """Scores each action of an episode; the scores are added to the actions' own rewards."""

    @property
    def name(self) -> str: ...

    async def score_turns(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> list[float | None]:
        """One score, or None for unscored, for each of `trajectory.actions`."""


Scoring = Reward | Callable[..., Any]


def as_reward(thing: Scoring) -> Reward:
    """`thing` as an outcome reward; a plain function is wrapped."""
    found = as_scoring(thing)
    if isinstance(found, TurnReward):
        raise ConfigError(f"the per-turn reward {found.name!r} stands alone: it cannot be combined")
    return found


def as_scoring(thing: Scoring | TurnReward) -> Reward | TurnReward:
    """`thing` as an outcome or per-turn reward; a plain function becomes an outcome reward."""
    if isinstance(thing, type):
        raise ConfigError(f"{thing.__name__} is a class; give an instance of it: {thing.__name__}(...)")
    if isinstance(thing, FunctionReward | FunctionTurnReward):
        return thing
    if hasattr(thing, "score_group"):
        raise ConfigError(f"{thing!r} scores groups; it belongs among the group rewards")
    if hasattr(thing, "name") and (hasattr(thing, "score") or hasattr(thing, "score_turns")):
        return thing
    if callable(thing):
        return FunctionReward(thing)
    raise ConfigError(f"{thing!r} is not a reward: give a function, or an object with name and score")


def weight_of(reward: Reward | TurnReward | GroupReward) -> float:
    """The reward's own weight; 1 where it has none."""
    return number(getattr(reward, "weight", 1.0), f"the weight of {reward.name!r}")


def members(rewards: Iterable[Any]) -> dict[str, Any]:
    """All rewards by name, those inside others included; two with one name are refused."""
    found: dict[str, Any] = {}
    for reward in rewards:
        inner = members(getattr(reward, "children", ()))
        for name, member in [(reward.name, reward), *inner.items()]:
            if found.setdefault(name, member) is not member:
                raise ConfigError(f"two rewards are called {name!r}; give one another name (name='...')")
    return found


async def evaluate(reward: Reward, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
    """The parts of one reward, checked; what the reward raises comes out as `InfraError`."""
    reward = at_strictness(reward)

    async def call() -> Parts:
        found = await ask(reward, reward.score, trajectory, task, envs)
        # parts that are final must not be read again: where what is paid is left out, they would be summed
        return found if isinstance(reward, SelfGuarded) else parts_of(found, reward.name)

    return await guarded(reward.name, call, function=reward.score)


async def evaluate_turns(
    reward: TurnReward, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
) -> list[float | None]:
    """The scores of one per-turn reward, checked."""
    reward = at_strictness(reward)

    async def call() -> list[float | None]:
        scores = await ask(reward, reward.score_turns, trajectory, task, envs)
        return turns_of(scores, reward.name, trajectory.turns)

    return await guarded(reward.name, call, function=reward.score_turns)


def takes_strictness(reward: Any) -> bool:
    """Whether a reward has the option: its function does, or a scoring method of its class."""
    if isinstance(reward, UserFunction):
        return STRICTNESS in reward.parameters.options
    methods = (getattr(reward, name, None) for name in ("score", "score_turns", "score_group"))
    return any(STRICTNESS in inspect.signature(method).parameters for method in methods if method)


def at_strictness(reward: T) -> T:
    """The reward as strict as it should be now; one that is a class is told when it is asked."""
    value = current_strictness.get()
    if value is None or not isinstance(reward, UserFunction) or not takes_strictness(reward):
        return reward
    return reward.using(**{STRICTNESS: value})


async def ask(reward: Any, method: Callable[..., Any], *args: Any) -> Any:
    """Call a method of a reward that somebody wrote as a class: sync or async, within its deadline."""
    strictness = current_strictness.get()
    if strictness is not None and STRICTNESS in inspect.signature(method).parameters:
        method = partial(method, **{STRICTNESS: strictness})
    if isinstance(reward, SelfGuarded):
        return await method(*args)
    timeout = getattr(reward, "timeout", DEFAULT_TIMEOUT)
    if inspect.iscoroutinefunction(method):
        return await in_time(method(*args), timeout)
    result = await run_sync(method, *args, timeout=timeout)
    return await in_time(result, timeout) if inspect.isawaitable(result) else result


async def evaluate_all(
    rewards: Sequence[Reward], trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
) -> list[Parts]:
    """The parts of each reward, in order."""
    return await together([(r, partial(evaluate, r, trajectory, task, envs)) for r in rewards])


async def together(asked: Sequence[tuple[Any, Callable[[], Awaitable[T]]]]) -> list[T]:
    """What each reward answers when asked; see the top of the module for who waits for whom."""
    one_at_a_time = asyncio.Lock()

    async def answer(reward: Any, question: Callable[[], Awaitable[T]]) -> T:
        if not getattr(reward, "uses_envs", True):
            return await question()
        async with one_at_a_time:
            return await question()

    tasks = [asyncio.create_task(answer(reward, question)) for reward, question in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
