"""`ProcessReplica`: an embedded engine in a process of its own, on this machine (`remote/channel.py`).

Requests are frames on one socket, many at once. Signs of life are asked of the engine's thread, which answers
between two steps. The process ends, with all it has started, when this one does.

`ServedEngine` is the other end: an `EmbeddedEngine` that is asked by operations and bytes, in a replica's
process or a Ray actor. Payloads are the bodies of frames: tokens are int32, log-probabilities float64, so
that nothing is rounded; images are the bytes of their files.
"""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.failures import EngineError, InfraError, LudusError
from ludus.core.generation import (
    Completion,
    Engine,
    FinishReason,
    OnTokens,
    Sampling,
    VersionSpan,
    checked_context,
)
from ludus.core.lru import LruCache
from ludus.core.messages import Json, MediaSpan
from ludus.engine.config import EngineConfig, EngineSetup
from ludus.engine.embedded.engine import EmbeddedEngine
from ludus.engine.embedded.request import Decode
from ludus.engine.replicas.weights import load_into, load_model
from ludus.remote.channel import Frame, ServiceProcess
from ludus.remote.supervisor import WorkerDied
from ludus.remote.threads import WorkerError

_IMAGE_BYTES = 1 << 28
"""Most bytes of image files that are kept for later requests."""


class _Missing(Exception):
    """Images of a request that are not here; the caller sends them along with it again."""

    def __init__(self, images: list[str]) -> None:
        super().__init__(images)
        self.images = images


def _decoder(folder: Path) -> Decode:
    """The folder's tokenizer, read while the folder is there: it goes when there are newer weights."""
    from transformers import AutoTokenizer

    found: Any = None
    if any(folder.glob("tokenizer*")):
        found = AutoTokenizer.from_pretrained(str(folder))

    def decode(tokens: Sequence[int]) -> str:
        if found is None:
            raise LudusError("stop strings need a tokenizer, and the model's folder has none")
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(found.decode(list(tokens), **options))

    return decode


class ServedEngine:
    """Answers requests; an error is sent back, with whether to try again."""

    def __init__(self) -> None:
        self._engine: EmbeddedEngine | None = None
        self._images: LruCache[bytes] = LruCache(_IMAGE_BYTES, len)

    async def answer(self, head: Json, body: bytes) -> tuple[Json, bytes]:
        """The reply to `head["operation"]`, or `{"error": ...}`."""
        return await self.told(lambda: self._perform(head["operation"], head, body))

    async def told(
        self, work: Callable[[], Coroutine[Any, Any, tuple[Json, bytes]]]
    ) -> tuple[Json, bytes]:
        """The reply to the caller: the result of `work`, or the error that it raises."""
        try:
            return await work()
        except _Missing as missing:
            return {"missing": missing.images}, b""
        except Exception as error:  # noqa: BLE001 - raised again where the request came from
            retriable = not isinstance(error, LudusError) or (
                isinstance(error, InfraError) and error.retriable
            )
            message = str(error) if isinstance(error, LudusError) else f"{type(error).__name__}: {error}"
            return {"error": {"message": message, "retriable": retriable}}, b""

    @property
    def engine(self) -> EmbeddedEngine:
        if self._engine is None:
            raise LudusError("a replica is started before it is asked")
        return self._engine

    async def _perform(self, operation: str, head: Json, body: bytes) -> tuple[Json, bytes]:
        if operation == "start":
            await asyncio.to_thread(self._start, head)
            return {}, b""
        engine = self.engine
        match operation:
            case "generate":
                sampling = head["sampling"]
                sampling |= {
                    "stop": tuple(sampling["stop"]),
                    "stop_tokens": tuple(sampling["stop_tokens"]),
                }
                tokens, media = self._context(head, body)
                return pack_completion(
                    await engine.generate(
                        tokens, Sampling(**sampling), session=head["session"], media=media
                    )
                )
            case "score":
                tokens, media = self._context(head, body)
                scored = await engine.score(tokens, media=media)
                return {}, pack_logprobs(scored)
            case "ping":
                await engine.score([0])  # which the engine's thread answers between two steps
            case "load_weights":
                model, folder = engine.model, Path(head["folder"])
                await engine.replace_weights(lambda: load_into(model, folder), head["version"])
            case "fork" | "release" | "abort" | "pause" | "resume" | "forget":
                sessions = {name: head[name] for name in ("session", "into") if name in head}
                await getattr(engine, operation)(**sessions)
            case _:
                raise LudusError(f"a replica knows no operation {operation!r}")
        return {}, b""

    def _context(self, head: Json, body: bytes) -> tuple[list[int], list[MediaSpan]]:
        """The tokens of a request and the images among them; raises `_Missing` where some were never sent."""
        packed, sent = unpack_images(head, body)
        for sha256, data in sent.items():
            self._images.get(sha256, partial(bytes, data))
        media = [
            MediaSpan(sha256, start, stop, sent.get(sha256) or self._images.find(sha256))
            for sha256, start, stop in head.get("media", ())
        ]
        if missing := {span.sha256 for span in media if span.data is None}:
            raise _Missing(sorted(missing))
        return unpack_tokens(packed), media

    def _start(self, setup: Json) -> None:
        import torch

        if setup["threads"] is not None:
            torch.set_num_threads(setup["threads"])
        folder = Path(setup["folder"])
        model = load_model(folder, setup["dtype"], setup["device"])
        # the engine has this device to itself: a pause need not hand the KV cache's memory to a trainer
        config = EngineConfig.model_validate({**setup["engine"], "release_memory": "never"})
        self._engine = EmbeddedEngine(model, _decoder(folder), config, version=setup["version"])


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return checked_context(tokens).astype("<i4").tobytes()


def pack_images(tokens: bytes, images: Mapping[str, bytes]) -> tuple[Json, bytes]:
    """Packed tokens and the files of images behind them, by their hashes."""
    head = {"images": [[sha256, len(data)] for sha256, data in images.items()]}
    return head, b"".join((tokens, *images.values()))


def unpack_images(head: Json, body: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Inverse of `pack_images`."""
    sizes = head.get("images", [])
    place = len(body) - sum(size for _, size in sizes)
    tokens, images = body[:place], {}
    for sha256, size in sizes:
        images[sha256] = body[place : place + size]
        place += size
    return tokens, images


def unpack_tokens(body: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(body, "<i4").tolist()
    return tokens


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return np.asarray(logprobs, "<f8").tobytes()


def unpack_logprobs(body: bytes) -> list[float]:
    logprobs: list[float] = np.frombuffer(body, "<f8").tolist()
    return logprobs


def pack_completion(completion: Completion) -> tuple[Json, bytes]:
    head = {
        "finish": completion.finish.value,
        "versions": [[span.start, span.version] for span in completion.versions],
        "stop": completion.stop,
        "cached_tokens": completion.cached_tokens,
    }
    tokens = np.asarray(completion.tokens, "<i4").tobytes()
    return head, tokens + pack_logprobs(completion.logprobs)


def unpack_completion(head: Json, body: bytes) -> Completion:
    count = len(body) // 12
    return Completion(
        tokens=unpack_tokens(body[: 4 * count]),
        logprobs=unpack_logprobs(body[4 * count :]),
        finish=FinishReason(head["finish"]),
        versions=tuple(VersionSpan(start, version) for start, version in head["versions"]),
        stop=head["stop"],
        cached_tokens=head["cached_tokens"],
    )


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
            "ludus.engine.replicas.process:ServedEngine",
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
