"""Rewards: plain Python functions of an episode, made by `@reward`, and how they are called.

A reward that breaks is an infrastructure failure and no score: it is retried, then raised as an `InfraError`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from ludus.core.failures import Aborted, Boundary, ConfigError, InfraError, MissingExtraError
from ludus.core.task import Task
from ludus.core.trajectory import Group, Trajectory
from ludus.core.user_code import defined_at, error_with_location, log_once
from ludus.remote.client import backoff
from ludus.remote.threads import threads_for
from ludus.rewards.scores import (
    DEFAULT_TIMEOUT,
    Parts,
    ScoreError,
    checked_name,
    checked_weight,
    parse_group_scores,
    parse_parts,
    parse_scores,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

SETTINGS = ("name", "weight", "timeout", "retries")
STRICTNESS = "strictness"
"""The option that a curriculum may change during training, wherever a reward has it."""
current_strictness: ContextVar[float | None] = ContextVar("current_strictness", default=None)
"""Its value for the episode that is being scored; None leaves every reward with its own."""

_CONNECTION_RETRIES = 2


class CheckedReward:
    """Marks rewards whose scoring returns checked scores and raises what `with_retries` raises."""


async def with_retries(
    name: str,
    call: Callable[[], Awaitable[T]],
    *,
    retries: int = 0,
    function: Callable[..., Any] | None = None,
) -> T:
    """Await `call`, with retries; a persistent error becomes an `InfraError` at the boundary REWARD.

    A lost connection is retried twice in any case. Errors of the recipe (`ConfigError`,
    `MissingExtraError`), a shutdown (`Aborted`) and an `InfraError` pass through. `function` is the user's:
    a value that is no score has no traceback that leads there, so the message names it.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await call()
        except (Aborted, ConfigError, MissingExtraError):
            raise
        except (Exception, SystemExit) as error:
            if attempt > _retries_for(error, retries):
                if isinstance(error, InfraError):
                    error.attempts = max(error.attempts, attempt)
                    raise
                raise failure(name, error, attempt, function) from error
        await asyncio.sleep(backoff(attempt - 1))


def _retries_for(error: BaseException, retries: int) -> int:
    if isinstance(error, ScoreError):
        return 0
    if isinstance(error, InfraError):
        return retries if error.retriable else 0
    return max(retries, _CONNECTION_RETRIES) if isinstance(error, ConnectionError) else retries


def failure(
    name: str,
    error: BaseException,
    attempts: int = 1,
    function: Callable[..., Any] | None = None,
) -> InfraError:
    """What breaks the reward `name`, as an infrastructure failure."""
    if isinstance(error, ScoreError):
        place = defined_at(function) if function is not None else None
        what = f"{error} ({place})" if place else str(error)
    else:
        what = error_with_location(error)
        log_once(_log, f"the reward {name!r}", error)
    retriable = isinstance(error, ConnectionError | TimeoutError)
    return InfraError(
        Boundary.REWARD, f"the reward {name!r} failed: {what}", attempts=attempts, retriable=retriable
    )


async def with_timeout(awaitable: Awaitable[T], timeout: float | None) -> T:
    """The result, or `TimeoutError` that says how long was allowed."""
    try:
        async with asyncio.timeout(timeout) as deadline:
            return await awaitable
    except TimeoutError as error:
        if deadline.expired():
            raise TimeoutError(f"no result within {timeout:g} seconds") from error
        raise


async def call_any(
    function: Callable[..., Any], timeout: float | None, *args: Any, **kwargs: Any
) -> Any:
    """Call a sync or async function within a timeout.

    A sync one runs in a thread, and its time counts from when a thread takes it up.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
    ):
        return await with_timeout(function(*args, **kwargs), timeout)
    envs = kwargs.get("envs")
    given = [*kwargs.values(), *(envs.values() if isinstance(envs, Mapping) else ())]
    threads = threads_for(function, *args, *given)
    result = await threads.run(partial(function, *args, **kwargs), timeout=timeout)
    return await with_timeout(result, timeout) if inspect.isawaitable(result) else result


class UserFunction(CheckedReward):
    """A user's function with a name, a weight, a timeout and retries; still callable as it was.

    Parameters are filled by name. Keyword-only parameters with a default that are none of `known` are options,
    which a recipe may set. A parameter that nothing fills is refused here, before training.
    """

    known: ClassVar[Sequence[str]] = ()
    """The names that a function may take."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        weight: float = 1.0,
        timeout: float | None = DEFAULT_TIMEOUT,
        retries: int = 0,
        options: Mapping[str, Any] | None = None,
        env: type | None = None,
    ) -> None:
        """`env` is the class of the environment that the function's `env` gets; see `@tool`."""
        self.function = function
        self.takes, self.option_names = _read_signature(function, self.known)
        self.options = dict(options or {})
        self.name = checked_name(name if name is not None else getattr(function, "__name__", ""))
        self.weight = checked_weight(weight, self.name)
        self.timeout = timeout
        self.retries = retries
        if timeout is not None and timeout <= 0:
            raise ConfigError(f"{self.name!r}: timeout must be above 0 seconds, or None; not {timeout}")
        if retries < 0:
            raise ConfigError(f"{self.name!r}: retries cannot be {retries}")
        self.uses_envs = bool(self.takes & {"env", "envs"})
        self.env = env
        if env is not None and not (isinstance(env, type) and "env" in self.takes):
            raise ConfigError(
                f"{self.name!r}: env={getattr(env, '__name__', env)} is the class of the environment that the "
                "function's parameter 'env' gets: give a class, and take `env`"
            )
        functools.update_wrapper(self, function, updated=())

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
            elif key in self.option_names:
                options[key] = value
            else:
                have = ", ".join([*SETTINGS, *sorted(self.option_names)])
                raise ConfigError(f"{self.name!r} has no option {key!r}; it has: {have}")
        settings |= {"env": self.env}
        return type(self)(self.function, **settings, options=options)

    async def _checked(self, values: Mapping[str, Any], parse: Callable[[Any], T]) -> T:
        """Call the function with the values that it takes, and `parse` its result; with retries."""

        async def call() -> T:
            given = {name: values[name] for name in self.takes}
            if "env" in given:
                given["env"] = _only_env(given["env"], self.env)
            return parse(await call_any(self.function, self.timeout, **given, **self.options))

        return await with_retries(self.name, call, retries=self.retries, function=self.function)


_OF_BATCHES = ("completions", "prompts", "completion_ids")
"""Parameters of reward functions that score a batch, as TRL's do."""
_BATCH_HINT = (
    ". A reward is asked about one episode, not a batch: for example (answer, target). "
    "Coming from TRL: docs/coming_from.md"
)


def _read_signature(
    function: Callable[..., Any], known: Sequence[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a function is called with, and the names of its options."""
    label = getattr(function, "__qualname__", None) or repr(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{label} cannot be a reward: {error}") from error
    takes: set[str] = set()
    options: set[str] = set()
    batch = _BATCH_HINT if "answer" in known else ""  # a group reward sees all attempts at a task
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{label} takes {parameter}; name its parameters instead{batch}")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{label}: {name!r} is positional-only, and is filled by name")
        if name in known:
            takes.add(name)
        elif parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is parameter.empty:
            option = f". An option of its own is keyword-only and has a default: (..., *, {name}=...)"
            raise ConfigError(
                f"{label} has a parameter {name!r} that nothing fills; known: {', '.join(known)}"
                f"{batch if batch and name in _OF_BATCHES else option}"
            )
        elif name in SETTINGS:
            raise ConfigError(f"an option cannot be called {name!r}: that is a setting")
        else:
            options.add(name)
    return frozenset(takes), frozenset(options)


def _only_env(envs: Mapping[str, Any], kind: type | None) -> Any:
    fitting = [env for env in envs.values() if kind is None or isinstance(env, kind)]
    if len(fitting) == 1:
        return fitting[0]
    if len(envs) != 1:
        have = ", ".join(envs) if envs else "none"
        wanted = "" if kind is None else f" of the class {kind.__name__}"
        raise ValueError(
            f"it takes `env`, which needs exactly one environment{wanted}; the task has: {have}. "
            "Take `envs`, a mapping by name, or name the environment: @reward(env=...), or in the task"
        )
    return next(iter(envs.values()))


class _EpisodeFunction(UserFunction):
    known = ("trajectory", "task", "envs", "env", "answer", "target", "messages")

    @staticmethod
    def _values(trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> dict[str, Any]:
        """`answer` is always text: an episode without one is scored as a wrong answer would be."""
        return {
            "trajectory": trajectory,
            "task": task,
            "envs": envs,
            "env": envs,
            "answer": trajectory.answer or "",
            "target": task.target,
            "messages": trajectory.messages,
        }


class FunctionReward(_EpisodeFunction):
    """A reward made of a function; it scores the whole episode."""

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        values = self._values(trajectory, task, envs)
        return await self._checked(values, lambda found: parse_parts(found, self.name))


class FunctionTurnReward(_EpisodeFunction):
    """A reward made of a function that returns one score, or None, for each action."""

    async def score_turns(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> list[float | None]:
        values = self._values(trajectory, task, envs)
        turns = trajectory.turns
        return await self._checked(values, lambda found: parse_scores(found, self.name, turns))


class FunctionGroupReward(UserFunction):
    known = ("group", "trajectories", "task")

    async def score_group(self, group: Group) -> list[float]:
        values = {"group": group, "trajectories": group.trajectories, "task": group.task}
        return await self._checked(values, lambda found: parse_group_scores(found, self.name, group))


class RewardSettings(TypedDict, total=False):
    name: str | None
    weight: float
    timeout: float | None
    retries: int
    env: type | None


@overload
def reward(function: Callable[..., Any], **settings: Unpack[RewardSettings]) -> FunctionReward: ...
@overload
def reward(
    *, per_turn: Literal[False] = False, **settings: Unpack[RewardSettings]
) -> Callable[[Callable[..., Any]], FunctionReward]: ...
@overload
def reward(
    *, per_turn: Literal[True], **settings: Unpack[RewardSettings]
) -> Callable[[Callable[..., Any]], FunctionTurnReward]: ...
def reward(
    function: Callable[..., Any] | None = None, *, per_turn: bool = False, **settings: Any
) -> Any:
    """Make a reward of a sync or async function, with or without parentheses.

    The function takes any of `trajectory`, `task`, `envs`, `env`, `answer`, `target`, `messages`, by
    name, and returns a number, a dictionary of named parts, or None for unscored. With `per_turn` it
    returns a list: a number or None for each action. `weight` is applied once, where scores are summed.
    `env` names the class of its environment, as in `@tool`.
    A sync function runs in a thread. An error, a timeout or a value that is no score fails the episode.
    """
    kind = FunctionTurnReward if per_turn else FunctionReward
    return partial(kind, **settings) if function is None else kind(function, **settings)


@overload
def group_reward(
    function: Callable[..., Any], **settings: Unpack[RewardSettings]
) -> FunctionGroupReward: ...
@overload
def group_reward(
    **settings: Unpack[RewardSettings],
) -> Callable[[Callable[..., Any]], FunctionGroupReward]: ...
def group_reward(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Make a group reward of a sync or async function, with or without parentheses.

    It takes any of `group`, `trajectories`, `task`, by name, and returns one number per attempt, in
    order. It is shown only attempts that can be trained on; failed ones have no score to give.
    """
    kind = FunctionGroupReward
    return partial(kind, **settings) if function is None else kind(function, **settings)
