"""`ProcessReplica`: an embedded engine in a process of its own, on this machine (`remote/worker.py`).

Requests are frames on one socket, many at once. Signs of life are asked of the engine's thread, which answers
between two steps. The process ends, with all it has started, when this one does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ludus.core.failures import EngineError
from ludus.core.messages import Json
from ludus.engine.config import EngineConfig, EngineSetup
from ludus.engine.replicas.requested import RequestedReplica
from ludus.remote.channel import Frame
from ludus.remote.supervisor import WorkerDied
from ludus.remote.threads import WorkerError
from ludus.remote.worker import ServiceProcess


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How a replica's process runs the model."""

    device: str = "cpu"
    dtype: str = "float32"
    engine: EngineConfig = field(default_factory=EngineConfig)
    threads: int | None = None
    """Of the process on the host; as many as torch likes when left out."""


def visible_device(device: str, visible: str | None) -> tuple[str, dict[str, str]]:
    """What a process calls its device, and the environment in which it sees no other GPU.

    Libraries put things on the current device, which is the first one in every new thread. `visible` is what
    this process sees: its own numbers count among those.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number:
        return device, {}
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    chosen = names[int(number)] if int(number) < len(names) else number
    return "cuda", {"CUDA_VISIBLE_DEVICES": chosen}


class ProcessReplica(RequestedReplica):
    """An `EmbeddedEngine` in a child process."""

    def __init__(
        self, number: int, settings: ReplicaSettings | None = None, *, hang_seconds: float = 600.0
    ) -> None:
        self._number, self._settings = number, settings or ReplicaSettings()
        self._hang_seconds = hang_seconds
        self._process: ServiceProcess | None = None
        self._version = -1

    @classmethod
    def of_run(cls, setup: EngineSetup) -> ProcessReplica:
        """One of the engines of a run that sample on this machine, beside the trainer."""
        settings = ReplicaSettings(setup.device, setup.dtype, setup.config, setup.threads)
        return cls(setup.number, settings, hang_seconds=setup.seconds)

    @property
    def name(self) -> str:
        process = f" (process {self.pid})" if self.pid is not None else ""
        return f"engine {self._number}{process}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def policy_version(self) -> int:
        return self._version

    async def start(self, folder: Path, version: int) -> None:
        await self.close()
        settings = self._settings
        device, variables = visible_device(settings.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if settings.threads is not None:
            variables["OMP_NUM_THREADS"] = str(settings.threads)
        variables["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "1")  # all comes from folders
        self._process = ServiceProcess(
            "ludus.engine.replicas.served:ServedEngine",
            hang_seconds=self._hang_seconds,
            name=f"engine {self._number}",
            variables=variables,
        )
        setup = {
            "folder": str(folder),
            "version": version,
            "device": device,
            "dtype": settings.dtype,
            "threads": settings.threads,
            "engine": settings.engine.model_dump(mode="json"),
        }
        await self._request("start", setup)
        self._version = version

    async def load_weights(self, folder: Path, version: int) -> None:
        await self._request("load_weights", {"folder": str(folder), "version": version})
        self._version = version

    async def ended(self) -> str:
        return "it was never started" if self._process is None else await self._process.ended()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _ask(self, operation: str, head: Json, body: bytes) -> Frame:
        if self._process is None:
            raise EngineError(f"{self.name} is not running")
        try:
            if operation == "start":
                return await self._process.start(head)
            return await self._process.request(operation, head, body)
        except (WorkerDied, WorkerError) as error:
            raise EngineError(str(error)) from error
