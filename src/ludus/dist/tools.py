"""Tools and environments in Ray actors, behind the interface of `ToolHost`.

Who waits for whom. An actor has an event loop and a tool set of its own and runs its requests side by side; the
server's admission, or the run's `max_in_flight`, bounds them. Each actor holds one request that never ends: it
fails when the actor dies, which is how the host learns of it. The host, not Ray, replaces an actor, because
only the host knows which episodes were lost with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.dist.actors import ActorWorker, RunActor
from ludus.dist.cluster import Claim, RayCluster
from ludus.envs.remote import RemoteEnv
from ludus.remote.channel import Frame
from ludus.tools.hosting import PooledHost, ToolFacts, ToolReference
from ludus.tools.hosting.host import LOADER
from ludus.tools.hosting.worker import HostedTools, reply_of
from ludus.tools.toolset import malformed


class RayHost(PooledHost):
    """A host of `workers` actors. Joins the cluster at `address` (or `RAY_ADDRESS`), or starts a local one."""

    def __init__(
        self,
        references: Sequence[ToolReference],
        workers: int = 2,
        *,
        address: str | None = None,
        cpus: float = 1.0,
        loader: str = LOADER,
        cluster: RayCluster | None = None,
    ) -> None:
        """`cpus` is what each actor claims of its node. Files named in references must exist on every node.
        With a `cluster`, the actors are those of its run, which ends them."""
        absolute = [_absolute(reference) for reference in references]
        claim = Claim("tool actor", workers, cpus=cpus)

        def make_worker(number: int) -> RayWorker:
            assert self._cluster is not None, "the host is not started"
            return RayWorker(self._cluster, ToolActor, "tools", number, claim, absolute, loader)

        super().__init__(make_worker, workers)
        self._address, self._claim = address, claim
        self._cluster, self._is_ours = cluster, cluster is None

    async def start(self) -> Sequence[ToolFacts]:
        if self._cluster is None:
            address = self._address or os.environ.get("RAY_ADDRESS") or "local"
            self._cluster = RayCluster("tools", address, None, [self._claim])
        return await super().start()

    async def stop(self) -> None:
        await super().stop()
        if self._is_ours and self._cluster is not None:
            self._cluster.close()
            self._cluster = None


class RayWorker(ActorWorker):
    """One actor."""

    async def request(self, operation: str, body: Json) -> Json:
        return reply_of(*await self.ask("perform", {"operation": operation, "body": body}))


class ToolActor(RunActor):
    """An actor that runs tools in the cluster."""

    async def build(self, references: list[ToolReference], loader: str) -> Json:
        self._tools = HostedTools()
        setup = {"operation": "start", "references": references, "loader": loader}
        return (await self._tools.answer(setup))[0]

    async def perform(self, head: Json) -> Frame:
        await self.tell({"requests": self._told.get("requests", 0) + 1})
        return await self._tools.answer(head)


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


def _absolute(reference: ToolReference) -> ToolReference:
    """Actors run in folders of their own, so files are named in full."""
    if isinstance(reference, str):
        where, _, attribute = reference.rpartition(":")
        return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else reference
    given = reference.get("tool")
    return {**reference, "tool": _absolute(given)} if isinstance(given, str) else reference
