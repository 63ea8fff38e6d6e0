"""An environment: something with state and a life cycle that an episode holds for itself.

Users write `Env` subclasses with sync or async methods; the functions below call either kind
without blocking the event loop, and normalise what they return.
"""

from __future__ import annotations

import inspect
import json
from asyncio import timeout as deadline
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from ludus.core.failures import Boundary, CannotFork, ConfigError, InfraError
from ludus.core.messages import Json, Media, ToolResult
from ludus.core.strict_json import decode
from ludus.core.task import Task
from ludus.remote.threads import threads_for
from ludus.tools import FunctionTool

ShowActions = Literal["no", "tool", "observation"]
Isolation = Literal["none", "thread", "process"]
OVER = "The episode is over."
"""Answer to an action after the end of an episode."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation for the agent: text and images."""

    text: str = ""
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a plain-text action. A reward of None means: not scored."""

    observation: Observation | str = ""
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: Json = field(default_factory=dict)

    def as_result(self) -> ToolResult:
        """The step as the result of a tool call; a truncated episode ends too."""
        seen = as_observation(self.observation)
        ended = self.terminated or self.truncated
        return ToolResult(seen.text, reward=self.reward, terminated=ended, media=seen.media)


@runtime_checkable
class KnowsState(Protocol):
    """A stand-in, which asks the environment elsewhere for its public attributes."""

    def public_state(self) -> Json: ...


@runtime_checkable
class ProbedEnvs(Protocol):
    """Makes environments on a server, which is asked before a run whether it is there."""

    async def probe(self, seconds: float, **options: Any) -> None:
        """Refuse an address where none answers within `seconds` (`ConfigError`)."""


@runtime_checkable
class ServedEnvs(ProbedEnvs, Protocol):
    """Makes environments that are sessions on a server of Ludus; `aclose` closes what all of them share."""

    async def aclose(self) -> None: ...


class ServerFull(InfraError):
    """A server has no room for another session, and may have later: the pool's episodes wait for one."""

    def __init__(self, message: str) -> None:
        super().__init__(Boundary.SERVER, message, kind="ServerFull")


class Env:
    """Subclass it; every method may be sync or async. Only what the agent needs has to be written.

    An agent acts through tools: mark methods with `@tool`. For an environment that takes plain text,
    such as a text game, write `step`.
    """

    step_rewards: ClassVar[str] = "sum"
    """The reward of an episode: the "sum" of its steps' rewards, or, where each of them is the score so far,
    the "max" (ScienceWorld in AgentFly) or the "last" one (in AgentGym). A recipe or a task decides first."""
    show_actions: ClassVar[ShowActions] = "no"
    """How `available_actions()` reaches the agent: not at all, by the tool `available_actions`, or at the end
    of each observation. A recipe decides first (`agent.pools.NAME.show_actions`)."""
    isolation: ClassVar[Isolation] = "none"
    """Where an instance lives: "none" shares this process's threads, "thread" has one thread for all of its
    sync methods (what is not thread-safe), "process" a process of its own (what crashes, hangs or leaks). A
    recipe decides first (`agent.pools.NAME.isolation`)."""
    step_timeout: ClassVar[float] = 60.0
    """Seconds that a call may take before the instance is replaced; a recipe decides first (`agent.pools`)."""
    deterministic: ClassVar[bool] = False
    """Whether the same calls after the same reset always have the same results. Branches of trees then reach a
    turn by making them again, where there is no `snapshot`. A recipe decides first (`agent.pools`)."""

    takes_text: bool | None = None
    """Whether `step` takes plain-text actions; None: if the class has a `step` of its own. A stand-in for an
    environment elsewhere says what is there."""

    if TYPE_CHECKING:
        # A subclass may add parameters of its own, which no signature written here would allow it.
        reset: Callable[..., Any]
    else:

        def reset(self, task: Task) -> Any:
            """Start afresh for `task`; return what the agent sees first: text, an `Observation`, None.

            It may have more parameters: they get what `task.envs` holds under this environment's name.
            """
            return None

    def step(self, action: str) -> Any:
        """Do what the text `action` says, and return a `Step` (or text, when nothing else happened)."""
        raise ConfigError(
            f"{type(self).__name__} takes no plain-text actions; write its `step`, or let the agent use "
            "its tools"
        )

    def tools(self) -> Any:
        """The tools of the agent; by default this object's own `@tool` methods."""
        return own_tools(self)

    def available_actions(self) -> Any:
        """The plain-text actions that make sense now, or None when that is not known."""
        return None

    def render(self) -> Any:
        """The state for people, in logs and viewers."""
        return repr(self)

    def is_healthy(self) -> Any:
        """Asked before a used instance is handed out again; one that says no is replaced."""
        return True

    def close(self) -> Any:
        """Release what it holds. Called once, also when a reset failed."""
        return None

    def snapshot(self) -> Any:
        """The state now, as a value that later calls do not change; write it with `restore`, for trees.

        One that holds something, such as a process, has a method `close`.
        """
        raise CannotFork("it has no snapshot", type(self).__name__)

    def restore(self, state: Any) -> Any:
        """Take over a `snapshot` of another instance; a `reset` for the same task comes first."""
        raise CannotFork("it has no snapshot", type(self).__name__)

    @staticmethod
    def of(function: Callable[..., Any]) -> type[Env]:
        """An environment from a generator function, sync or async, that takes a task: use it as a decorator.

        What it yields first is what the agent sees first. Then each `yield` gives what an action led to (text,
        an `Observation`, a `Step`) and returns the next action. When the function ends, so does the episode;
        what it returns is the last reward (a number), the last observation (text) or the last `Step`. Its
        docstring describes the tool `step`. Further parameters get what `task.envs` holds, as those of `reset`.
        """
        return _from_generator(function)


class _GeneratorEnv(Env):
    """The environment that `Env.of` makes; an attribute `script` holds the user's function."""

    script: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        self._play: Any = None

    def _started(self, *args: Any, **arguments: Any) -> Any:
        self._play = self.script(*args, **arguments)
        return self._play

    def _seen(self, value: Any) -> Step:
        """A yielded value as a step; nothing follows after a step that ends the episode."""
        step = as_step(value)
        if step.terminated or step.truncated:
            self._play = None
        return step

    def _ended(self, value: Any) -> Step:
        self._play = None
        if isinstance(value, Real):
            return Step(OVER, float(value), terminated=True)
        step = as_step(OVER if value is None else value)
        return replace(step, terminated=not step.truncated)


class _SyncScript(_GeneratorEnv):
    def begin(self, *args: Any, **arguments: Any) -> Observation:
        self.close()
        try:
            return as_observation(next(self._started(*args, **arguments)))
        except StopIteration:
            raise _without_yield(self) from None

    def act(self, action: str) -> Step:
        if self._play is None:
            return Step(OVER, terminated=True)
        try:
            return self._seen(self._play.send(action))
        except StopIteration as end:
            return self._ended(end.value)

    def close(self) -> None:
        play, self._play = self._play, None
        if play is not None:
            play.close()


class _AsyncScript(_GeneratorEnv):
    async def begin(self, *args: Any, **arguments: Any) -> Observation:
        await self.close()
        try:
            return as_observation(await anext(self._started(*args, **arguments)))
        except StopAsyncIteration:
            raise _without_yield(self) from None

    async def act(self, action: str) -> Step:
        if self._play is None:
            return Step(OVER, terminated=True)
        try:
            return self._seen(await self._play.asend(action))
        except StopAsyncIteration:
            return self._ended(None)

    async def close(self) -> None:
        play, self._play = self._play, None
        if play is not None:
            await play.aclose()


def _without_yield(env: Env) -> ConfigError:
    return ConfigError(f"{type(env).__name__} ended before it yielded what the agent sees first")


def _from_generator(function: Callable[..., Any]) -> type[Env]:
    name = getattr(function, "__qualname__", repr(function))
    is_async = inspect.isasyncgenfunction(function)
    if not (is_async or inspect.isgeneratorfunction(function)):
        raise ConfigError(
            f"Env.of takes a generator function, which {name} is not: `action = yield observation` shows "
            "something to the agent and waits for its action"
        )
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise ConfigError(f"{name} takes no parameter; the first one is the task")
    base: Any = _AsyncScript if is_async else _SyncScript

    # each class has its own two, with the function's parameters and docstring
    async def reset_async(self: Any, *args: Any, **arguments: Any) -> Any:
        return await self.begin(*args, **arguments)

    async def step_async(self: Any, action: str) -> Any:
        return await self.act(action)

    def reset(self: Any, *args: Any, **arguments: Any) -> Any:
        return self.begin(*args, **arguments)

    def step(self: Any, action: str) -> Any:
        return self.act(action)

    methods = {"reset": reset_async, "step": step_async} if is_async else {"reset": reset, "step": step}
    made: Any = type(function.__name__, (base,), {"script": staticmethod(function), **methods})
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    made.reset.__signature__ = inspect.Signature([itself, *parameters])
    made.step.__doc__ = made.__doc__ = function.__doc__
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    found: type[Env] = made
    return found


def own_tools(env: object) -> list[FunctionTool[..., Any]]:
    """The `@tool` methods of an object, bound to it, in the order in which they are written."""
    names: dict[str, None] = {}
    for kind in reversed(type(env).__mro__):
        names.update(
            (name, None) for name, value in vars(kind).items() if isinstance(value, FunctionTool)
        )
    found = [getattr(env, name) for name in names]
    return [one for one in found if isinstance(one, FunctionTool)]


async def call_env(
    function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
) -> Any:
    """Await a method of an environment, sync (in a thread) or async, at most `timeout` seconds."""
    if inspect.iscoroutinefunction(function):
        return await _within(function(*args, **kwargs), timeout)
    value = await threads_for(function).run(function, *args, timeout=timeout, **kwargs)
    return await _within(value, timeout) if inspect.isawaitable(value) else value


async def _within(awaitable: Awaitable[Any], timeout: float | None) -> Any:
    async with deadline(timeout):
        return await awaitable


def as_env(made: Any, name: str) -> Any:
    """The object of a factory as an environment; refused if it cannot be one."""
    if callable(getattr(made, "reset", None)):
        return made
    raise ConfigError(
        f"the environment {name!r}: what should make an instance returned {made!r:.80}, which has no method "
        "reset; name a class of environments, or a function that returns a new instance"
    )


async def reset_env(
    env: Any, task: Task, name: str = "", *, timeout: float | None = None
) -> Observation:
    """Reset for `task`; a `reset` that takes more than the task gets the arguments under `name`."""
    parameters = inspect.signature(env.reset)
    arguments = dict(task.envs.get(name) or {}) if len(parameters.parameters) > 1 else {}
    try:
        parameters.bind(task, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"task {task.id!r} gives the environment {name!r} the arguments {sorted(arguments)}, but "
            f"{type(env).__name__}.reset does not take them ({error}); what the task's envs hold and the "
            "parameters of reset must agree"
        ) from error
    return as_observation(await call_env(env.reset, task, timeout=timeout, **arguments))


async def step_env(env: Any, action: str) -> Step:
    """Do a plain-text action."""
    return as_step(await call_env(env.step, action))


def setting_of(env: Any, name: str) -> Any:
    """An attribute that `Env` declares, of an environment or a class that need not inherit from it."""
    return getattr(env, name, getattr(Env, name))


def takes_text(env: Any) -> bool:
    """Whether it takes plain-text actions: it has a `step` of its own."""
    told: bool | None = setting_of(env, "takes_text")
    return setting_of(type(env), "step") is not Env.step if told is None else told


def has_snapshots(env: Any) -> bool:
    """Whether an environment, or a class of them, has `snapshot` and `restore`."""
    kind = env if isinstance(env, type) else env.__class__  # a stand-in's is that of what it stands for
    return all(is_own(kind, name) for name in ("snapshot", "restore"))


def is_own(kind: type[Any], name: str) -> bool:
    """Whether a class has a method that is not the one that `Env` only declares; None is none."""
    return setting_of(kind, name) not in (None, getattr(Env, name))


_MOST_STATE = 65_536
"""Characters of JSON up to which an attribute travels with an environment's state."""


async def public_state(env: Any) -> Json:
    """An environment's public attributes and properties as JSON, for rewards in another process.

    Left out are methods, what JSON has no word for, and what takes more than 64 kB.
    """
    is_elsewhere = isinstance(env, KnowsState)
    state: Json = await call_env(env.public_state if is_elsewhere else partial(read_state, env))
    return state


def read_state(env: Any) -> Json:
    """The environment's state, read in the process where it lives."""
    names = [name for name in getattr(env, "__dict__", {}) if not name.startswith("_")]
    for kind in type(env).__mro__:
        found = [name for name, one in vars(kind).items() if isinstance(one, property | cached_property)]
        names += [name for name in found if not name.startswith("_")]
    state: Json = {}
    for name in dict.fromkeys(names):
        try:
            value = to_jsonable_python(getattr(env, name), inf_nan_mode="null")
            if len(json.dumps(value)) <= _MOST_STATE:
                state[name] = value
        except Exception:  # noqa: BLE001, S112 - user code, and objects that are no data
            continue
    return state


_OBSERVATION = TypeAdapter(Observation)


def observation_to_json(seen: Observation) -> Json:
    """An observation with its media, for another process."""
    fields: Json = _OBSERVATION.dump_python(seen, mode="json")
    return fields


def observation_from_json(raw: Any) -> Observation:
    """The observation; a `ValueError` says what does not fit."""
    return decode(_OBSERVATION, raw)


def as_observation(value: Any) -> Observation:
    """The return value of a reset as an `Observation`."""
    if isinstance(value, Observation):
        return value
    if value is None or isinstance(value, str):
        return Observation(value or "")
    raise TypeError(
        f"an environment's observation must be text, an Observation or None, not {type(value).__name__}"
    )


def as_step(value: Any) -> Step:
    """A step's return value (`Step`, Gymnasium's tuple of five, or the observation) as a `Step`."""
    if isinstance(value, tuple) and len(value) == 5:
        observation, reward, terminated, truncated, info = value
        value = Step(observation, float(reward), bool(terminated), bool(truncated), dict(info))
    if not isinstance(value, Step):
        return Step(as_observation(value))
    return Step(
        as_observation(value.observation), value.reward, value.terminated, value.truncated, value.info
    )
