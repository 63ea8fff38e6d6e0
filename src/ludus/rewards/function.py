"""`@reward`: a plain Python function that scores an episode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self, overload

from ludus.core.concurrency import run_sync
from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.episode import KNOWN, arguments
from ludus.rewards.guard import DEFAULT_TIMEOUT, SelfGuarded, guarded, in_time
from ludus.rewards.parameters import SETTINGS, Parameters
from ludus.rewards.values import RESERVED_NAMES, Parts, ScoreError, number, parts_of, turns_of

ENV_NAMES = frozenset({"env", "envs"})


class UserFunction(SelfGuarded):
    """A user's function with a name, a weight, a deadline and retries; still callable as it was."""

    known: ClassVar[Sequence[str]] = KNOWN

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        weight: float = 1.0,
        timeout: float | None = DEFAULT_TIMEOUT,
        retries: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.function = function
        self.parameters = Parameters.of(function, self.known)
        self.options = dict(options or {})
        self.name = checked_name(name if name is not None else getattr(function, "__name__", ""))
        self.weight = checked_weight(weight, self.name)
        self.timeout = timeout
        self.retries = retries
        if timeout is not None and timeout <= 0:
            raise ConfigError(f"{self.name!r}: timeout must be above 0 seconds, or None; not {timeout}")
        if retries < 0:
            raise ConfigError(f"{self.name!r}: retries cannot be {retries}")
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
        )
        functools.update_wrapper(self, function, updated=())

    @property
    def uses_envs(self) -> bool:
        """Whether it touches the episode's environments, which only one reward may do at a time."""
        return bool(self.parameters.wanted & ENV_NAMES)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **{**self.options, **kwargs})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def using(self, **changes: Any) -> Self:
        """A copy with other settings (name, weight, timeout, retries) or options of its function."""
        settings = {key: getattr(self, key) for key in SETTINGS}
        options = dict(self.options)
        for key, value in changes.items():
            if key in settings:
                settings[key] = value
            elif key in self.parameters.options:
                options[key] = value
            else:
                have = ", ".join([*SETTINGS, *sorted(self.parameters.options)])
                raise ConfigError(f"{self.name!r} has no option {key!r}; it has: {have}")
        return type(self)(self.function, **settings, options=options)

    async def _call(self, values: Mapping[str, Any]) -> Any:
        """One call. A sync function's deadline counts from when a thread takes it up."""
        call = partial(self.function, **values, **self.options)
        if self._is_async:
            return await in_time(call(), self.timeout)
        result = await run_sync(call, timeout=self.timeout)
        return await in_time(result, self.timeout) if inspect.isawaitable(result) else result


class EpisodeFunction(UserFunction):
    """A function of an episode."""

    async def _result(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Any:
        return await self._call(arguments(self.parameters.wanted, trajectory, task, envs))


class FunctionReward(EpisodeFunction):
    """A reward made of a function; it scores the whole episode."""

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        async def call() -> Parts:
            return parts_of(await self._result(trajectory, task, envs), self.name)

        return await guarded(self.name, call, retries=self.retries, function=self.function)


class FunctionTurnReward(EpisodeFunction):
    """A reward made of a function that returns one score, or None, for each action."""

    async def score_turns(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> list[float | None]:
        async def call() -> list[float | None]:
            return turns_of(await self._result(trajectory, task, envs), self.name, trajectory.turns)

        return await guarded(self.name, call, retries=self.retries, function=self.function)


def checked_name(name: str) -> str:
    """`name`, if a reward may be called that."""
    if not isinstance(name, str) or not name or name == "<lambda>":
        raise ConfigError("a reward needs a name: use a named function, or reward(..., name='...')")
    if name in RESERVED_NAMES:
        raise ConfigError(f"a reward cannot be called {name!r}: that part of the score has a meaning")
    return name


def checked_weight(weight: float, name: str) -> float:
    """`weight`, if a score can be multiplied by it. 0 means: shown, but not counted."""
    try:
        return number(weight, f"the weight of {name!r}")
    except ScoreError as error:
        raise ConfigError(str(error)) from error


@overload
def reward(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    weight: float = 1.0,
    timeout: float | None = DEFAULT_TIMEOUT,
    retries: int = 0,
    per_turn: Literal[False] = False,
) -> FunctionReward: ...
@overload
def reward(
    *,
    name: str | None = None,
    weight: float = 1.0,
    timeout: float | None = DEFAULT_TIMEOUT,
    retries: int = 0,
    per_turn: Literal[False] = False,
) -> Callable[[Callable[..., Any]], FunctionReward]: ...
@overload
def reward(
    *,
    name: str | None = None,
    weight: float = 1.0,
    timeout: float | None = DEFAULT_TIMEOUT,
    retries: int = 0,
    per_turn: Literal[True],
) -> Callable[[Callable[..., Any]], FunctionTurnReward]: ...
def reward(
    function: Callable[..., Any] | None = None, *, per_turn: bool = False, **settings: Any
) -> Any:
    """Make a reward of a sync or async function, with or without parentheses.

    The function takes any of `trajectory`, `task`, `envs`, `env`, `answer`, `target`, `messages`, by
    name, and returns a number, a dictionary of named parts, or None for unscored. With `per_turn` it
    returns a list: a number or None for each action. `weight` is applied once, where scores are summed.
    A sync function runs in a thread. An error, a timeout or a value that is no score fails the episode.
    """
    kind = FunctionTurnReward if per_turn else FunctionReward
    if function is None:
        return partial(kind, **settings)
    return kind(function, **settings)
