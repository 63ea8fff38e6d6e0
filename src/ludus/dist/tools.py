"""Tools and environments in Ray actors, behind the interface of `ToolHost`.

Who waits for whom. An actor has an event loop and a tool set of its own and runs its requests side by side; the
server's admission, or the run's `max_in_flight`, bounds them. Each actor holds one request that never ends: it
fails when the actor dies, which is how the host learns of it. The host, not Ray, replaces an actor, because
only the host knows which episodes were lost with it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.dist.actors import RunActor
from ludus.dist.cluster import Claim, RayCluster, alive_nodes, load_ray, on_node
from ludus.tools.hosting import PooledHost, ToolFacts, ToolReference, WorkerDied
from ludus.tools.hosting.host import LOADER, reply_of
from ludus.tools.hosting.worker import HostedTools

_START_SECONDS = 300.0


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
        claim, numbers = Claim("tool actor", workers, cpus=cpus), itertools.count()

        def make_worker() -> RayWorker:
            assert self._cluster is not None, "the host is not started"
            return RayWorker(absolute, loader, self._cluster, claim, next(numbers) % workers)

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


class RayWorker:
    """One actor."""

    def __init__(
        self,
        references: Sequence[ToolReference],
        loader: str,
        cluster: RayCluster,
        claim: Claim,
        number: int,
    ) -> None:
        self._references, self._loader = list(references), loader
        self._cluster, self._claim, self._number = cluster, claim, number
        self._actor: Any = None
        self._end: Any = None

    async def start(self) -> Json:
        ray = load_ray()
        where = node_for(self._claim, self._number)
        self._actor = self._cluster.start(ToolActor, "tools", self._number, self._claim, where)
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer: Json = await self._actor.build.remote(self._references, self._loader)
        except TimeoutError:
            message = f"no actor came up within {_START_SECONDS:g} seconds; has the cluster free cores?"
            raise ConfigError(message) from None
        except ray.exceptions.RayError as error:
            raise ConfigError(f"an actor could not be started: {error}") from error
        self._end = self._actor.live.remote()
        return reply_of(answer)

    async def request(self, operation: str, body: Json) -> Json:
        ray = load_ray()
        reference = self._actor.perform.remote(operation, body)
        try:
            return reply_of(await reference)
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except (ray.exceptions.RayActorError, ray.exceptions.TaskCancelledError) as error:
            raise WorkerDied(_died(error)) from error

    async def ended(self) -> str:
        ray = load_ray()
        try:
            await self._end
        except ray.exceptions.RayError as error:
            return _died(error)
        return "an actor ended"

    async def kill(self) -> None:
        if self._actor is not None:
            self._cluster.kill(self._actor)
            self._actor = None


class ToolActor(RunActor):
    """What runs in the cluster."""

    async def build(self, references: list[ToolReference], loader: str) -> Json:
        self._tools = HostedTools(references, loader)
        return await self._tools.load()

    async def perform(self, operation: str, body: Json) -> Json:
        await self.tell({"requests": self._told.get("requests", 0) + 1})
        answer, text = await self._tools.answer(operation, body)
        return answer if text is None else {"reply": {**answer["reply"], "content": text}}


def node_for(claim: Claim, number: int) -> Any:
    """Nodes without GPUs where there are some, in turn; another one where that is full or gone meanwhile."""
    nodes = alive_nodes()
    plain = [node for node in nodes if not node.gpus] or nodes
    free = [node for node in plain if node.free_cpus >= claim.cpus] or plain
    free.sort(key=lambda node: -node.free_cpus)
    return on_node(free[number % len(free)].id, soft=True)


def _died(error: Exception) -> str:
    return f"a Ray actor died ({type(error).__name__})"


def _absolute(reference: ToolReference) -> ToolReference:
    """Actors run in folders of their own, so files are named in full."""
    if isinstance(reference, str):
        where, _, attribute = reference.rpartition(":")
        return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else reference
    given = reference.get("tool")
    return {**reference, "tool": _absolute(given)} if isinstance(given, str) else reference
