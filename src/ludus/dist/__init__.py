"""Placement on a cluster: tools in Ray actors, behind the interface of `ToolHost`. Needs the extra `ray`.

Who waits for whom. An actor has an event loop and a tool set of its own and runs its requests side by side; the
server's admission bounds them. Each actor holds one request that never ends: it fails when the actor dies,
which is how the host learns of it. The host, not Ray, replaces an actor, because only the host knows which
episodes were lost with it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.messages import Json
from ludus.tools.hosting import PooledHost, ToolFacts, ToolReference, WorkerDied
from ludus.tools.hosting.host import LOADER, reply_of
from ludus.tools.hosting.worker import HostedTools

_OBJECT_STORE_BYTES = 100 * 1024 * 1024
_MOST_REQUESTS = 10_000
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
    ) -> None:
        """`cpus` is what each actor claims of its node. Files named in references must exist on every node."""
        absolute = [_absolute(reference) for reference in references]
        super().__init__(lambda: RayWorker(absolute, cpus, loader), workers)
        self._address, self._claimed = address, workers * cpus
        self._started_ray = False

    async def start(self) -> Sequence[ToolFacts]:
        ray = _ray()
        if not ray.is_initialized():
            options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
            if self._address is None and not os.environ.get("RAY_ADDRESS"):
                # A cluster of our own: small, and with as many cores as the actors claim.
                options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
                options["num_cpus"] = max(1, round(self._claimed))
            else:
                options["address"] = self._address
            ray.init(**options)
            self._started_ray = True
        return await super().start()

    async def stop(self) -> None:
        await super().stop()
        if self._started_ray:
            self._started_ray = False
            _ray().shutdown()


class RayWorker:
    """One actor."""

    def __init__(
        self, references: Sequence[ToolReference], cpus: float, loader: str = LOADER
    ) -> None:
        self._references, self._cpus, self._loader = list(references), cpus, loader
        self._actor: Any = None
        self._end: Any = None

    async def start(self) -> Json:
        ray = _ray()
        options = {"num_cpus": self._cpus, "max_concurrency": _MOST_REQUESTS, "max_restarts": 0}
        self._actor = ray.remote(_ToolActor).options(**options).remote()
        path = [entry for entry in sys.path if isinstance(entry, str)]
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer: Json = await self._actor.build.remote(
                    path, self._references, self._loader
                )
        except TimeoutError:
            message = f"no actor came up within {_START_SECONDS:g} seconds; has the cluster free cores?"
            raise ConfigError(message) from None
        except ray.exceptions.RayError as error:
            raise ConfigError(f"an actor could not be started: {error}") from error
        self._end = self._actor.live.remote()
        return reply_of(answer)

    async def request(self, operation: str, body: Json) -> Json:
        ray = _ray()
        reference = self._actor.perform.remote(operation, body)
        try:
            return reply_of(await reference)
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except (ray.exceptions.RayActorError, ray.exceptions.TaskCancelledError) as error:
            raise WorkerDied(_died(error)) from error

    async def ended(self) -> str:
        ray = _ray()
        try:
            await self._end
        except ray.exceptions.RayError as error:
            return _died(error)
        return "an actor ended"

    async def kill(self) -> None:
        if self._actor is not None:
            _ray().kill(self._actor)
            self._actor = None


class _ToolActor:
    """What runs in the cluster."""

    async def build(self, path: list[str], references: list[ToolReference], loader: str) -> Json:
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        self._tools = HostedTools(references, loader)
        return await self._tools.load()

    async def perform(self, operation: str, body: Json) -> Json:
        answer, text = await self._tools.answer(operation, body)
        return answer if text is None else {"reply": {**answer["reply"], "content": text}}

    async def live(self) -> None:
        await asyncio.Event().wait()


def _died(error: Exception) -> str:
    return f"a Ray actor died ({type(error).__name__})"


def _absolute(reference: ToolReference) -> ToolReference:
    """Actors run in folders of their own, so files are named in full."""
    if isinstance(reference, str):
        where, _, attribute = reference.rpartition(":")
        return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else reference
    given = reference.get("tool")
    return {**reference, "tool": _absolute(given)} if isinstance(given, str) else reference


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError("ray", "ray", "hosting tools on a cluster") from error
