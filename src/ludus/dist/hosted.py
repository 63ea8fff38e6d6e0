"""A run's tools and environments on the nodes of a cluster, as the run's own process knows them.

They live in the actors of a `RayHost`, which opens an episode in one of them and says so when its state is lost
with an actor: the episode is then played again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.dist.tools import RayHost
from ludus.envs.remote import RemoteEnv
from ludus.tools.toolset import malformed


class HostSessions:
    """The episodes of a host, as a tool set and as the sessions of environments."""

    def __init__(self, host: RayHost) -> None:
        self._host = host

    async def open(self, context: ToolContext) -> None:
        await self._host.open(context)

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return await self._host.list(context)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.fault is not None:
            return malformed(call)
        return await self._host.call(call, context)

    async def close(self, context: ToolContext) -> None:
        await self._host.close(context)

    async def observation(self, context: ToolContext, env: str) -> Any:
        return await self._host.ask("observation", context, {"env": env})

    async def ask(self, what: str, context: ToolContext, env: str) -> Json:
        return await self._host.ask(what, context, {"env": env})


class HostedEnvs:
    """Makes environments that live in a host: each instance stands for a session there."""

    is_session = True

    def __init__(self, host: RayHost, described: Json) -> None:
        """`described` is what the host says of the environment."""
        self._sessions, self._described = HostSessions(host), described

    async def __call__(self) -> RemoteEnv:
        return RemoteEnv(self._sessions, self._described)
