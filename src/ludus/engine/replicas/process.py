"""`ProcessReplica`: an embedded engine in a process of its own, on this machine.

Who waits for whom: requests are frames on one socket, many at once; a coroutine here reads the replies and
resolves their futures. A second one sends a ping every few seconds, which the engine's thread answers between
two steps: a process that does not for `hang_seconds` is killed. The process ends, with all it has started,
when this one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ludus.core.failures import EngineError
from ludus.core.messages import Json
from ludus.engine.config import EngineConfig
from ludus.engine.registry import EngineSetup
from ludus.engine.replicas.frames import pack_frame, read_frame
from ludus.engine.replicas.requested import RequestedReplica
from ludus.remote.processes import WorkerProcess
from ludus.remote.threads import WorkerError

_PING_SECONDS = 5.0


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
        self._number, self._settings, self._hang_seconds = (
            number,
            settings or ReplicaSettings(),
            hang_seconds,
        )
        self._process: WorkerProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[tuple[Json, bytes]]] = {}
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[str] | None = None
        self._last_heard = 0.0
        self._version = -1

    @classmethod
    def of_run(cls, setup: EngineSetup) -> ProcessReplica:
        """One of the engines of a run that sample on this machine, beside the trainer."""
        settings = ReplicaSettings(setup.device, setup.dtype, setup.config, setup.threads)
        return cls(setup.number, settings, hang_seconds=setup.seconds)

    @property
    def name(self) -> str:
        process = f" (process {self._process.pid})" if self._process is not None else ""
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
        try:
            # what libraries print is for people to read; our own output may be for programs
            self._process = WorkerProcess(
                "-m", "ludus.engine.replicas.worker", stdout=2, variables=variables
            )
        except WorkerError as error:
            raise EngineError(f"engine {self._number}: {error}") from error
        self._ended = asyncio.get_running_loop().create_future()
        reader, self._writer = await asyncio.open_connection(sock=self._process.connection)
        self._last_heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._read(reader))]
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._writer.write(pack_frame({"path": path}))
        await self._request(
            "start",
            {
                "folder": str(folder),
                "version": version,
                "device": device,
                "dtype": settings.dtype,
                "threads": settings.threads,
                "engine": settings.engine.model_dump(mode="json"),
            },
        )
        self._version = version
        self._tasks.append(asyncio.create_task(self._watch(self._process)))

    async def load_weights(self, folder: Path, version: int) -> None:
        await self._request("load_weights", {"folder": str(folder), "version": version})
        self._version = version

    async def ended(self) -> str:
        if self._ended is None:
            return "it was never started"
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.kill)
            self._lose(f"engine {self._number} was ended")
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _request(
        self, operation: str, head: Json | None = None, body: bytes = b""
    ) -> tuple[Json, bytes]:
        if self._writer is None or self._ended is None:
            raise EngineError(f"{self.name} is not running")
        if self._ended.done():
            raise EngineError(self._ended.result())
        number = next(self._numbers)
        future: asyncio.Future[tuple[Json, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._writer.write(
                pack_frame({"number": number, "operation": operation, **(head or {})}, body)
            )
            return await future
        except asyncio.CancelledError:
            if self._writer is not None and not self._writer.is_closing():
                self._writer.write(pack_frame({"number": number, "operation": "cancel"}))
            raise
        finally:
            self._waiting.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                head, body = await read_frame(reader)
                self._last_heard = time.monotonic()
                future = self._waiting.get(head["number"])
                if future is None or future.done():
                    continue
                if (error := head.get("error")) is not None:
                    future.set_exception(EngineError(error["message"], retriable=error["retriable"]))
                else:
                    future.set_result((head, body))
        except (asyncio.IncompleteReadError, ConnectionError):
            assert self._process is not None
            self._lose(f"engine {self._number}: {await asyncio.to_thread(self._process.ending, 5.0)}")

    async def _watch(self, process: WorkerProcess) -> None:
        """Ask for a sign of life; kill a process that gives none."""
        while True:
            await asyncio.sleep(min(_PING_SECONDS, self._hang_seconds / 4))
            if time.monotonic() - self._last_heard > self._hang_seconds:
                self._lose(f"{self.name} did not answer for {self._hang_seconds:g} s")
                process.signal()
                return
            if self._writer is not None and not self._writer.is_closing():
                self._writer.write(pack_frame({"number": 0, "operation": "ping"}))

    def _lose(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineError(reason))
