"""An `EmbeddedEngine` that is asked by operations and bytes: what a replica's process and a Ray actor hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ludus.core.failures import InfraError, LudusError
from ludus.core.generation import Sampling
from ludus.core.lru import LruCache
from ludus.core.messages import Json, MediaSpan
from ludus.engine.config import EngineConfig
from ludus.engine.embedded.engine import EmbeddedEngine
from ludus.engine.replicas.frames import (
    pack_completion,
    pack_logprobs,
    unpack_images,
    unpack_tokens,
)
from ludus.engine.replicas.weights import load_into, load_model

_IMAGE_BYTES = 1 << 28
"""Most bytes of image files that are kept for later requests."""


class _Missing(Exception):
    """Images of a request that are not here; the caller sends them along with it again."""

    def __init__(self, images: list[str]) -> None:
        super().__init__(images)
        self.images = images


class _Decoder:
    """The folder's tokenizer, loaded when a request has the first stop string."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Any = None

    def prepare(self) -> None:
        """While the folder is there: it goes when there are newer weights."""
        from transformers import AutoTokenizer

        if any(self._folder.glob("tokenizer*")):
            self._tokenizer = AutoTokenizer.from_pretrained(str(self._folder))

    def __call__(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise LudusError("stop strings need a tokenizer, and the model's folder has none")
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(tokens), **options))


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
                scored = await engine.score(tokens, temperature=head["temperature"], media=media)
                return {}, pack_logprobs(scored)
            case "ping":
                await engine.score([0])  # which the engine's thread answers between two steps
            case "load_weights":
                model, folder = engine.model, Path(head["folder"])
                await engine.replace_weights(lambda: load_into(model, folder), head["version"])
            case "fork":
                await engine.fork(head["session"], head["into"])
            case "release":
                await engine.release(head["session"])
            case "abort":
                await engine.abort(head["session"])
            case "pause":
                await engine.pause()
            case "resume":
                await engine.resume()
            case "forget":
                await engine.forget()
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
        decoder = _Decoder(folder)
        decoder.prepare()
        # the engine has this device to itself: a pause need not hand the KV cache's memory to a trainer
        config = EngineConfig.model_validate({**setup["engine"], "release_memory": "never"})
        self._engine = EmbeddedEngine(model, decoder, config, version=setup["version"])
