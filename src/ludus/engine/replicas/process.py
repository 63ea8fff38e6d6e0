"""`ProcessReplica`: an embedded engine in a process of its own, on this machine (`remote/channel.py`).

Requests are frames on one socket, many at once. Signs of life are asked of the engine's thread, which answers
between two steps. The process ends, with all it has started, when this one does.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, Engine, OnTokens, Sampling
from ludus.core.messages import Json, MediaSpan
from ludus.engine.config import EngineConfig, EngineSetup
from ludus.engine.replicas.served import (
    pack_images,
    pack_tokens,
    unpack_completion,
    unpack_logprobs,
)
from ludus.remote.channel import Frame, ServiceProcess
from ludus.remote.supervisor import WorkerDied
from ludus.remote.threads import WorkerError


class RequestedReplica(Engine):
    """The part of an engine elsewhere that asks."""

    @abstractmethod
    async def _ask(self, operation: str, head: Json, body: bytes) -> Frame:
        """The reply of the `ServedEngine`; its death is raised as `EngineError`."""

    async def _request(self, operation: str, head: Json | None = None, body: bytes = b"") -> Frame:
        """The reply of the `ServedEngine`; an error in it is raised as `EngineError`."""
        reply, found = await self._ask(operation, head or {}, body)
        return checked(reply), found

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        head = {"sampling": asdict(sampling), "session": session}
        return unpack_completion(*await self._request_on("generate", head, tokens, media))

    async def score(self, tokens: Sequence[int], *, media: Sequence[MediaSpan] = ()) -> list[float]:
        _, body = await self._request_on("score", {}, tokens, media)
        return unpack_logprobs(body)

    async def _request_on(
        self, operation: str, head: Json, tokens: Sequence[int], media: Sequence[MediaSpan]
    ) -> Frame:
        """A request on a context. Images go by their hashes; those that the engine asks for are sent then.

        An episode shows the same images in every turn, and attempts at a task share theirs.
        """
        packed = pack_tokens(tokens)
        if not media:
            return await self._request(operation, head, packed)
        spans = [[span.sha256, span.start, span.stop] for span in media]
        at_hand = {span.sha256: span.data for span in media}
        sent: dict[str, bytes] = {}
        while True:
            about, body = pack_images(packed, sent)
            reply, found = await self._request(operation, {**head, **about, "media": spans}, body)
            missing = [sha256 for sha256 in reply.get("missing", ()) if sha256 not in sent]
            if not missing:
                return reply, found
            for sha256 in missing:
                data = at_hand[sha256]
                if data is None:
                    raise EngineError(
                        f"the bytes of the image {sha256[:12]} are not at hand", retriable=False
                    )
                sent[sha256] = data

    async def fork(self, session: str, into: str) -> None:
        await self._request("fork", {"session": session, "into": into})

    async def release(self, session: str) -> None:
        await self._request("release", {"session": session})

    async def abort(self, session: str) -> None:
        await self._request("abort", {"session": session})

    async def pause(self) -> None:
        await self._request("pause")

    async def resume(self) -> None:
        await self._request("resume")

    async def forget(self) -> None:
        await self._request("forget")


def checked(reply: Json) -> Json:
    """A reply of the `ServedEngine`; an error in it is raised as `EngineError`."""
    if (error := reply.get("error")) is not None:
        raise EngineError(error["message"], retriable=error["retriable"])
    return reply


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
