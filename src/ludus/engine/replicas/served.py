"""An `EmbeddedEngine` that is asked by operations and bytes: what a replica's process and a Ray actor hold.

Payloads are the bodies of frames (`remote/channel.py`): tokens are int32, log-probabilities float64, so that
nothing is rounded; images are the bytes of their files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.failures import InfraError, LudusError
from ludus.core.generation import Completion, FinishReason, Sampling, VersionSpan, checked_context
from ludus.core.lru import LruCache
from ludus.core.messages import Json, MediaSpan
from ludus.engine.config import EngineConfig
from ludus.engine.embedded.engine import EmbeddedEngine
from ludus.engine.embedded.request import Decode
from ludus.engine.replicas.weights import load_into, load_model

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
