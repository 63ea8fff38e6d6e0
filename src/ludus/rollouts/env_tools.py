"""What an agent can do to an environment, as tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ludus.core.failures import Boundary, ConfigError, InfraError, MissingExtraError
from ludus.core.messages import ToolResult
from ludus.core.user_code import located
from ludus.envs import Env, call_env, step_env
from ludus.tools import Tool


class TextActions(Tool):
    """Do what the text says."""

    name = "step"

    def __init__(self, env: Any) -> None:
        super().__init__()
        self._env = env

    async def run(self, action: str) -> ToolResult:
        return (await step_env(self._env, action)).as_result()


async def tools_of(env: Any, name: str) -> list[Tool | Callable[..., Any]]:
    """The environment's own tools, and `step` where it takes plain-text actions."""
    try:
        tools = list(await call_env(env.tools))
    except (ConfigError, InfraError, MissingExtraError):
        raise
    except Exception as error:
        message = f"the environment {name!r} could not say what its tools are: {located(error)}"
        raise InfraError(Boundary.ENV, message) from error
    takes_text = getattr(type(env), "step", Env.step) is not Env.step
    names = [getattr(tool, "name", getattr(tool, "__name__", "")) for tool in tools]
    if takes_text and TextActions.name not in names:
        tools.append(TextActions(env))
    return tools
