"""Rollout engines on the nodes of a cluster: each an `EmbeddedEngine` in an actor, with weights of its own.

New weights are put into Ray's object store once, by the trainer. Every node fetches them once, however many
engines it has: they share its memory, and copy from it into their modules in place. The store holds two
versions at most, the newest and the one before.

Who waits for whom: requests are calls of the actor, many at once. A call that never ends tells of its death,
and one every few seconds, which the engine's thread answers between two steps, of a hang. The
caller has the deadlines (`ReplicatedEngine`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.failures import EngineError
from ludus.core.messages import Json
from ludus.dist.actors import RunActor
from ludus.dist.cluster import Claim, RayCluster, cause_of, in_group, load_ray
from ludus.engine.replicas.process import ReplicaSettings, RequestedReplica, checked
from ludus.engine.replicas.served import ServedEngine
from ludus.engine.replicas.weights import WEIGHTS, copy_into, load_into
from ludus.remote.channel import Frame
from ludus.remote.processes import ScratchFolder

_PING_SECONDS = 5.0


class WeightObjects:
    """The folders of a `WeightSource` in the object store: each version is put there once, for all engines."""

    def __init__(self) -> None:
        self._versions: dict[int, Any] = {}
        self._lock = threading.Lock()

    def put(self, folder: Path, version: int) -> Any:
        """The object with the weights of a version. Run it in a thread: it takes as long as copying them."""
        with self._lock:
            if version not in self._versions:
                mapped = np.memmap(folder / WEIGHTS, np.uint8, "r")
                self._versions[version] = load_ray().put(np.asarray(mapped))
                for old in sorted(self._versions)[:-2]:
                    del self._versions[old]
            return self._versions[version]


class EngineActor(RunActor):
    """One engine."""

    async def start(self, head: Json, files: Mapping[str, bytes], weights: Any) -> Json:
        """Load a model from its files; they are kept, without the weights, for architectures whose weights go
        by other names in files."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from folders
        self._served, self._files = ServedEngine(), dict(files)
        with _model_folder(files, weights) as folder:
            reply, _ = await self._served.answer(
                {**head, "operation": "start", "folder": str(folder)}, b""
            )
        await self.tell({"version": head["version"]})
        return reply

    async def load_weights(self, weights: Any, version: int) -> Json:
        """Copy new weights into the module, from the memory that this node's engines share."""

        async def load() -> tuple[Json, bytes]:
            await self._served.engine.replace_weights(lambda: self._copy(weights), version)
            return {}, b""

        reply, _ = await self._served.told(load)
        await self.tell({"version": version})
        return reply

    def _copy(self, weights: Any) -> None:
        if not copy_into(self._served.engine.model, weights):
            with _model_folder(self._files, weights) as folder:
                load_into(self._served.engine.model, folder)

    async def perform(self, head: Json, body: bytes) -> tuple[Json, bytes]:
        return await self._served.answer(head, body)


class RayReplica(RequestedReplica):
    """An engine in an actor."""

    def __init__(
        self,
        number: int,
        settings: ReplicaSettings,
        cluster: RayCluster,
        claim: Claim,
        group: Any,
        weights: WeightObjects,
        *,
        hang_seconds: float,
    ) -> None:
        self._number, self._settings, self._hang_seconds = number, settings, hang_seconds
        self._cluster, self._claim, self._group, self._weights = cluster, claim, group, weights
        self._actor: Any = None
        self._end: asyncio.Task[str] | None = None
        self._version = -1

    @property
    def name(self) -> str:
        return f"engine {self._number} (a Ray actor)"

    @property
    def policy_version(self) -> int:
        return self._version

    async def start(self, folder: Path, version: int) -> None:
        await self.close()
        where = in_group(self._group, self._number)
        self._actor = self._cluster.start(EngineActor, "engine", self._number, self._claim, where)
        settings = self._settings
        head = {
            "version": version,
            "device": settings.device,
            "dtype": settings.dtype,
            "threads": settings.threads,
            "engine": settings.engine.model_dump(mode="json"),
        }
        files = _other_files(folder)
        weights = await asyncio.to_thread(self._weights.put, folder, version)
        checked(await self._call("start", head, files, weights))
        self._version = version
        self._end = asyncio.create_task(self._watch(self._actor))

    async def load_weights(self, folder: Path, version: int) -> None:
        weights = await asyncio.to_thread(self._weights.put, folder, version)
        checked(await self._call("load_weights", weights, version))
        self._version = version

    async def ended(self) -> str:
        end = self._end
        if end is not None:
            await asyncio.wait([end])
            if not end.cancelled():
                return end.result()
        return f"{self.name} was ended"

    async def close(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)
        actor, self._actor = self._actor, None
        if actor is not None:
            self._cluster.kill(actor)

    async def _ask(self, operation: str, head: Json, body: bytes) -> Frame:
        found: Frame = await self._call("perform", {**head, "operation": operation}, body)
        return found

    async def _call(self, method: str, *arguments: Any) -> Any:
        ray, actor = load_ray(), self._actor
        if actor is None:
            raise EngineError(f"{self.name} is not running")
        answer = getattr(actor, method).remote(*arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except ray.exceptions.RayError as error:
            raise EngineError(f"{self.name} died: {cause_of(error)}") from error

    async def _watch(self, actor: Any) -> str:
        """Return when it has died or does not answer, with the reason."""
        ray = load_ray()
        end = asyncio.ensure_future(_awaited(actor.live.remote()))
        try:
            while True:
                done, _ = await asyncio.wait([end], timeout=min(_PING_SECONDS, self._hang_seconds / 4))
                if done:
                    await end
                    return f"{self.name} ended"
                async with asyncio.timeout(self._hang_seconds):
                    await actor.perform.remote({"operation": "ping"}, b"")
        except TimeoutError:
            return f"{self.name} did not answer for {self._hang_seconds:g} s"
        except ray.exceptions.RayError as error:
            return f"{self.name} died: {cause_of(error)}"
        finally:
            end.cancel()


def _other_files(folder: Path) -> dict[str, bytes]:
    """Files of a model's folder other than its weights: its configuration, its tokenizer."""
    others = [file for file in folder.iterdir() if file.is_file() and file.name != WEIGHTS]
    return {file.name: file.read_bytes() for file in others}


@contextmanager
def _model_folder(files: Mapping[str, bytes], weights: Any) -> Iterator[Path]:
    """A folder with these files and weights, for as long as a model is loaded from it.

    An actor is ended by a kill, at any time. So its weights are in memory that has no name, to which the folder
    has a link: that ends with the process, and gigabytes are never left behind.
    """
    scratch, memory = ScratchFolder("ludus-replica-"), os.memfd_create("ludus-weights")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(memoryview(weights))
        for name, data in files.items():
            (scratch.path / name).write_bytes(data)
        (scratch.path / WEIGHTS).symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
        yield scratch.path
    finally:
        os.close(memory)
        scratch.remove()


async def _awaited(answer: Any) -> Any:
    return await answer
