"""Base of the actors of a run: their owner, and their status.

`RunActor` is what runs in the cluster, `ActorWorker` what the process that has started it knows of it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.dist.cluster import Claim, RayCluster, cause_of, load_ray, node_for
from ludus.remote.supervisor import WorkerDied
from ludus.tools.hosting.worker import reply_of

_START_SECONDS = 300.0


class RunActor:
    """An actor of a run. It is asked on an event loop, so that it answers while it works.

    On its own it holds a place: rank 0 is the process of `ludus train`, which Ray does not know of.
    """

    def __init__(self, path: list[str], folder: str, run: str, role: str, number: int) -> None:
        """`path` is where modules are looked for, and `folder` where relative paths begin, as in the process
        that started it. Without shared storage this node may not have the folder."""
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        with suppress(OSError):
            os.chdir(folder)
        self._folder = folder
        self._told: Json = {"run": run, "role": role, "number": number, "pid": os.getpid()}
        self._heard = time.time()

    async def tell(self, facts: Mapping[str, Any]) -> None:
        """Remember what `status` shows."""
        self._told |= facts
        self._heard = time.time()

    async def status(self) -> Json:
        """Its run, its place, and its last request or work."""
        runtime = importlib.import_module("ray").get_runtime_context()
        return {
            **self._told,
            "node": runtime.get_node_id(),
            "gpu_ids": runtime.get_accelerator_ids().get("GPU", []),
            "memory_bytes": sum(_resident(pid) for pid in {os.getpid(), self._told["pid"]}),
            "seconds_since_heard": round(time.time() - self._heard, 1),
        }

    async def live(self) -> None:
        """Never returns: a request that fails when the actor dies, which is how that is noticed."""
        await asyncio.Event().wait()


class ActorWorker:
    """An actor as a worker of a supervisor. Its class has a method `build`, which is called once."""

    def __init__(
        self,
        cluster: RayCluster,
        kind: type[RunActor],
        role: str,
        number: int,
        claim: Claim,
        *setup: Any,
    ) -> None:
        """`setup` are the arguments of `build`."""
        self._cluster, self._kind, self._role, self._number = cluster, kind, role, number
        self._claim, self._setup = claim, setup
        self._actor: Any = None
        self._end: Any = None

    async def start(self) -> Json:
        """Start it; what its `build` gives. `ConfigError` where it does not come up."""
        where = node_for(self._claim, self._number)
        self._actor = self._cluster.start(self._kind, self._role, self._number, self._claim, where)
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer: Json = await self._actor.build.remote(*self._setup)
        except TimeoutError:
            message = f"no actor came up within {_START_SECONDS:g} seconds; has the cluster free cores?"
            raise ConfigError(message) from None
        except load_ray().exceptions.RayError as error:
            raise ConfigError(f"an actor could not be started: {error}") from error
        self._end = self._actor.live.remote()
        return reply_of(answer)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor; `WorkerDied` when it dies first. Cancelling it cancels the work."""
        ray = load_ray()
        reference = getattr(self._actor, method).remote(*arguments)
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except (ray.exceptions.RayActorError, ray.exceptions.TaskCancelledError) as error:
            raise WorkerDied(f"a Ray actor died: {cause_of(error)}") from error

    async def ended(self) -> str:
        try:
            await self._end
        except load_ray().exceptions.RayError as error:
            return f"a Ray actor died: {cause_of(error)}"
        return "a Ray actor ended"

    async def kill(self) -> None:
        if self._actor is not None:
            self._cluster.kill(self._actor)
            self._actor = None


def _resident(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/statm").read_text(encoding="ascii")
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # it has ended, or this is no Linux
        return 0
