"""Tools of an environment, and the order in which calls may use it.

Calls of one action run concurrently, but those that work on one environment run one after another, in the
order in which the model wrote them: an environment is not made for two callers at once, and an episode is the
same each time. Each call has the environment's deadline (`step_timeout`), which counts from when it has the
environment.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ludus.core.failures import Boundary, ConfigError, InfraError, MissingExtraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.core.user_code import error_with_location
from ludus.envs.env import Observation, ShowActions, call_env, step_env, takes_text
from ludus.tools import LocalTools, Tool
from ludus.tools.calling import Encode
from ludus.tools.signature import Signature, signature_of
from ludus.tools.tool import Limiter

_MOST_ACTIONS = 100
"""Actions that an observation lists; ScienceWorld offers thousands."""


class StepTool(Tool):
    """Do what the text says.

    Args:
        action: What to do.
    """

    name = "step"
    timeout = None  # the environment's deadline is the one that counts

    def __init__(self, env: Any) -> None:
        self._signature = _step_signature(type(env).step)
        super().__init__()
        self._env = env

    @property
    def owner(self) -> Any:
        return self._env

    async def run(self, action: str) -> ToolResult:
        return (await step_env(self._env, action)).as_result()


@lru_cache(maxsize=64)
def _step_signature(step: Callable[..., Any]) -> Signature:
    """One text argument; described by the docstring of the environment's own `step` where it has one."""
    documentation = inspect.getdoc(step) if step.__doc__ else StepTool.__doc__
    return signature_of(StepTool.run, StepTool.name, is_method=True, documentation=documentation)


class ForwardedTool(Tool):
    """A tool of an environment that lives elsewhere: it is checked and run over there."""

    def __init__(
        self, env: Any, spec: ToolSpec, run: Callable[[Any, ToolContext], Awaitable[ToolResult]]
    ) -> None:
        """`run` takes the arguments as the model wrote them."""
        self._env, self._spec, self._forward = env, spec, run
        self.name, self.description = spec.name, spec.description
        self._limiter = Limiter(None)

    @property
    def owner(self) -> Any:
        return self._env

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    def check(self, context: ToolContext) -> None:
        """Its object is over there."""

    async def call(
        self, arguments: Any, context: ToolContext, *, encode: Encode | None = None
    ) -> ToolResult:
        async with context.exclusive(self._env):
            return await self._forward(arguments, context)


class AvailableActionsTool(Tool):
    """List the actions that are possible now."""

    name = "available_actions"
    timeout = None

    def __init__(self, env: Any) -> None:
        super().__init__()
        self._env = env

    @property
    def owner(self) -> Any:
        return self._env

    async def run(self) -> str:
        return await actions_text(self._env) or "It is not known which actions are possible."


async def actions_text(env: Any) -> str:
    """Text about an environment's available actions; empty where it does not list them."""
    offered = await call_env(env.available_actions)
    if offered is None:
        return ""
    shown = json.dumps([str(one) for one in offered[:_MOST_ACTIONS]], ensure_ascii=False)
    more = len(offered) - _MOST_ACTIONS
    return f"Available actions: {shown}" + (f" and {more} more" if more > 0 else "")


@dataclass(slots=True)
class EnvAccess:
    """An episode's environments; call it with one to use it: one caller at a time, within its deadline."""

    _held: dict[int, tuple[str, float | None, asyncio.Lock]] = field(default_factory=dict)

    def add(self, name: str, env: Any, timeout: float | None) -> None:
        """Guard this environment."""
        self._held[id(env)] = name, timeout, asyncio.Lock()

    @asynccontextmanager
    async def __call__(self, env: Any) -> AsyncIterator[None]:
        """Use an environment; what is none of the episode's is not guarded."""
        if id(env) not in self._held:
            yield
            return
        name, seconds, lock = self._held[id(env)]
        async with lock:
            try:
                async with asyncio.timeout(seconds) as deadline:
                    yield
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                message = (
                    f"the environment {name!r} did not answer within {seconds:g} seconds (agent.pools."
                    f"{name}.step_timeout), and is replaced"
                )
                # the same call again would find the instance stuck: the episode is played again in another
                raise InfraError(
                    Boundary.ENV, message, retriable=False, replay=True, kind="TimeoutError"
                ) from error


class EnvTools(LocalTools):
    """The tools of one environment of an episode."""

    def __init__(
        self,
        env: Any,
        tools: Sequence[Tool | Callable[..., Any]],
        show_actions: ShowActions = "no",
        *,
        encode: Encode | None = None,
    ) -> None:
        shown = [AvailableActionsTool(env)] if show_actions == "tool" else []
        super().__init__([*tools, *shown], encode=encode)
        self._env, self._show_actions = env, show_actions
        self._own: dict[str, str] = {}
        """The environment's own name of each tool that the agent knows by another name."""

    def rename(self, names: Mapping[str, str]) -> None:
        """Let the agent know tools by other names."""
        self._own = {new: own for own, new in names.items()}

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        shown = {own: new for new, own in self._own.items()}
        specs = await super().list(context)
        return [replace(spec, name=shown.get(spec.name, spec.name)) for spec in specs]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.name in self._own:
            call = replace(call, name=self._own[call.name])
        result = await super().call(call, context)
        if self._show_actions != "observation" or result.terminated:
            return result
        async with context.exclusive(self._env):
            text = await actions_text(self._env)
        return replace(result, content=f"{result.content}\n\n{text}") if text else result

    async def first(self, observation: Observation, context: ToolContext) -> str:
        """The first observation of the agent."""
        if self._show_actions != "observation":
            return observation.text
        async with context.exclusive(self._env):
            text = await actions_text(self._env)
        return "\n\n".join(part for part in (observation.text, text) if part)


def rename_clashes(sets: Mapping[str, EnvTools]) -> None:
    """Tools that several environments of an episode have are called by the environment, too: `lake_step`."""
    counts = Counter(one.name for tools in sets.values() for one in tools.tools)
    for env, tools in sets.items():
        names = [one.name for one in tools.tools if counts[one.name] > 1]
        tools.rename({name: f"{env}_{name}" for name in names})


async def tools_of(env: Any, name: str) -> list[Tool | Callable[..., Any]]:
    """The environment's own tools, and `step` where it takes plain-text actions."""
    try:
        tools = list(await call_env(env.tools))
    except (ConfigError, InfraError, MissingExtraError):
        raise
    except Exception as error:
        message = (
            f"the environment {name!r} could not say what its tools are: {error_with_location(error)}"
        )
        raise InfraError(Boundary.ENV, message) from error
    names = [getattr(tool, "name", getattr(tool, "__name__", "")) for tool in tools]
    if takes_text(env) and StepTool.name not in names:
        tools.append(StepTool(env))
    return tools
