"""An environment on a server (`ludus serve env`), used like any other: a recipe names its address.

An instance here stands for a session there: a reset opens one for its task, and the pool closes it when the
episode is over, because others may wait for what it holds there. Tools are checked and run over
there; schemas, arguments, results, rewards and images travel as JSON. A server that is gone, restarted or
hangs is an infrastructure failure (`InfraError`), and the episode is played again; calls that may be sent again
are, and run once (see `RemoteTools`).

Rewards read the environment's public attributes (`env.opened`) from a copy that is fetched when the episode is
over: what JSON can carry, up to 64 kB each.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.core.task import Task
from ludus.envs.env import Env, Observation, Step, observation_from_json
from ludus.envs.tools import ForwardedTool
from ludus.tools import Tool
from ludus.tools.remote import RemoteTools
from ludus.tools.remote_http import normalized, protocol_error
from ludus.tools.wire import spec_from_json


class RemoteEnvs:
    """Makes environments of one address; all of them share its connections."""

    def __init__(self, address: str) -> None:
        """`address` is `http://host:port`, or `http://host:port/NAME` where the server has several."""
        self._base, self._name = _split(address)
        self.address = address
        self._tools: dict[Any, RemoteTools] = {}
        self._described: Json | None = None

    async def __call__(
        self,
        token: str | None = None,
        token_file: str | None = None,
        deadline: float = 300.0,
        unreachable_seconds: float = 30.0,
    ) -> RemoteEnv:
        """The token is `LUDUS_TOKEN` when left out, on loopback our user's own. `deadline` bounds a call with
        all its attempts; a server that cannot be reached is tried for `unreachable_seconds`, which is less
        than a pool waits for a reset."""
        tools = self._client(token, token_file, deadline, unreachable_seconds)
        if self._described is None:
            self._described = await self._describe(tools)
        return RemoteEnv(tools, self._described)

    async def probe(self, seconds: float, **options: Any) -> None:
        """Refuse an address at which no such environment is found within `seconds`."""
        given = inspect.signature(self.__call__).bind(**options)
        given.apply_defaults()
        try:
            self._described = await self._describe(self._client(*given.args), within=seconds)
        except InfraError as error:
            raise ConfigError(f"no environment server at {self.address}: {error}") from error
        finally:
            await self.aclose()  # not everything that is probed is used

    def _client(
        self, token: str | None, token_file: str | None, deadline: float, unreachable_seconds: float
    ) -> RemoteTools:
        """The connections of instances with these settings."""
        settings = (token, token_file, deadline, unreachable_seconds)
        if settings not in self._tools:
            given = token if token_file is None else _read_token(token_file)
            self._tools[settings] = RemoteTools(
                self._base, token=given, deadline=deadline, unreachable_seconds=unreachable_seconds
            )
        return self._tools[settings]

    @property
    def served_name(self) -> str | None:
        """The server's name of the environment, once it was asked."""
        return None if self._described is None else str(self._described["name"])

    async def aclose(self) -> None:
        """Close the connections; the next instance opens others."""
        for tools in self._tools.values():
            await tools.aclose()

    async def _describe(self, tools: RemoteTools, within: float | None = None) -> Json:
        listed = await tools.envs(within)
        names = [str(one.get("name")) for one in listed]
        wanted = self._name or (names[0] if len(names) == 1 else None)
        if wanted not in names:
            served = ", ".join(names) or "no environments (ludus serve env NAME)"
            raise ConfigError(
                f"{self.address} names {'no environment' if wanted is None else repr(wanted)}, and the server "
                f"has {served}: write http://host:port/NAME"
            )
        return listed[names.index(wanted)]


class EnvSessions(Protocol):
    """Sessions that hold environments, wherever they live; `RemoteTools` has those of a server."""

    async def open(self, context: ToolContext) -> None: ...

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]: ...

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult: ...

    async def close(self, context: ToolContext) -> None: ...

    async def observation(self, context: ToolContext, env: str) -> Any:
        """The first observation of an environment of the episode."""

    async def ask(self, what: str, context: ToolContext, env: str) -> Json:
        """Ask an environment of the episode for its "actions" or its "state"."""


class RemoteEnv(Env):
    """One instance: a session on the server, once it is reset."""

    def __init__(self, tools: EnvSessions, described: Json) -> None:
        """`described` is what the server says of the environment (`GET /v1/envs`)."""
        try:
            self._name = str(described["name"])
            self._specs = [spec_from_json(raw) for raw in described["tools"]]
            self.takes_text = bool(described["takes_text"])
            # the class variables of the environment over there
            vars(self)["step_rewards"] = described["step_rewards"]
            vars(self)["show_actions"] = described["show_actions"]
        except (KeyError, TypeError) as error:
            raise protocol_error(f"/v1/envs: {error!r}") from error
        self._remote = tools
        self._context: ToolContext | None = None
        self._state: Json | None = None

    async def reset(self, task: Task, **arguments: Any) -> Observation:
        """Open a session for the task. The server's name of the environment need not be the recipe's."""
        await self.close()
        self._state = None
        theirs = replace(task, envs={self._name: arguments})
        self._context = ToolContext(f"{task.id}~{secrets.token_hex(6)}", theirs)
        await self._remote.open(self._context)
        self._specs = list(await self._remote.list(self._context))
        try:
            return observation_from_json(await self._remote.observation(self._context, self._name))
        except ValueError as error:
            raise protocol_error(f"an observation: {error}") from error

    def tools(self) -> list[Tool]:
        return [ForwardedTool(self, spec, partial(self._forwarded, spec.name)) for spec in self._specs]

    async def _forwarded(self, name: str, arguments: Any, context: ToolContext) -> ToolResult:
        return await self.call_tool(ToolCall(name, arguments))

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """Run one of its tools, over there."""
        self._state = None
        return await self._remote.call(call, self._session)

    async def step(self, action: str) -> Step:
        result = await self.call_tool(ToolCall("step", {"action": action}))
        return Step(Observation(result.content, result.media), result.reward, result.terminated)

    async def available_actions(self) -> list[str] | None:
        found = (await self._remote.ask("actions", self._session, self._name)).get("actions")
        if found is not None and not isinstance(found, list):
            raise protocol_error(f"actions: {found!r:.200}")
        return found

    async def fetch_state(self) -> None:
        """Fetch the attributes that rewards may read; the rollout does it when the episode is over."""
        found = (await self._remote.ask("state", self._session, self._name)).get("state")
        if not isinstance(found, dict):
            raise protocol_error(f"state: {found!r:.200}")
        self._state = found

    async def close(self) -> None:
        """Close the session, if there is one; the server's instance goes back to its pool."""
        context, self._context = self._context, None
        if context is not None:
            await self._remote.close(context)

    def render(self) -> str:
        return f"{self._name} on a server"

    def __getattr__(self, name: str) -> Any:
        state = vars(self).get("_state")
        if state is not None and name in state:
            return state[name]
        if name.startswith("_"):
            raise AttributeError(name)
        when = "" if state is not None else " before the episode is over"
        known = ", ".join(sorted(state or {})) or "nothing"
        raise AttributeError(
            f"the environment is on a server: its {name!r} cannot be read from here{when}, only {known}: "
            "public attributes and properties that JSON can carry, up to 64 kB each"
        )

    @property
    def _session(self) -> ToolContext:
        if self._context is None:
            raise InfraError(Boundary.ENV, f"the environment {self._name!r} was not reset")
        return self._context


def _read_token(file: str) -> str:
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file = {file!r}: {error}") from error


def _split(address: str) -> tuple[str, str | None]:
    """The server, and the environment's name: the last part of the path."""
    try:
        parts = urlsplit(address)
        head, _, name = parts.path.rpartition("/")
        return normalized(parts._replace(path=head).geturl()), name or None
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            f"{address!r} is not a valid environment address; write http://host:port, or http://host:port/NAME "
            "where the server has several"
        ) from error
