"""A replica in this process, over the real engine, that can be made to die, to hang and to update by half."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_models import plain_logprobs
from transformers import PreTrainedModel

from ludus.core import EngineError
from ludus.core.generation import Completion, Engine, Sampling
from ludus.core.messages import MediaSpan
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.engine.replicas.weights import load_into, load_model


class TrainedModel:
    """What engines know of a trainer: its module."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.size = sum(p.numel() * p.element_size() for p in model.parameters())

    def write(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def score(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> list[float]:
        return plain_logprobs(self.model, list(tokens))

    @torch.no_grad()
    def learn(self, seed: int, size: float = 0.05) -> None:
        """Change all weights."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


class LocalReplica(Engine):
    """Everything but the process is real: folders are read, the engine samples."""

    def __init__(self, number: int) -> None:
        self._name = f"engine {number}"
        self.engine: EmbeddedEngine | None = None
        self.starts: list[int] = []
        self.loads: list[int] = []
        self.requests: list[str | None] = []
        self.cannot_start: str | None = None
        self.left_out: str | None = None
        """The tensor that an update leaves as it was."""
        self.hangs_at: str | None = None
        """The call that never returns."""
        self._death: asyncio.Future[str] | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def policy_version(self) -> int:
        return -1 if self.engine is None else self.engine.policy_version

    @property
    def alive(self) -> EmbeddedEngine:
        assert self.engine is not None
        return self.engine

    async def start(self, folder: Path, version: int) -> None:
        self.starts.append(version)
        await self._maybe_hang("start")
        if self.cannot_start is not None:
            raise EngineError(self.cannot_start)
        self._death = asyncio.get_running_loop().create_future()
        model = load_model(folder, "float32", "cpu")
        self.engine = EmbeddedEngine(model, config=EngineConfig(cache_tokens=4096), version=version)

    async def load_weights(self, folder: Path, version: int) -> None:
        self.loads.append(version)
        await self._maybe_hang("load_weights")
        await self.alive.replace_weights(lambda: self._load(folder), version)

    def _load(self, folder: Path) -> None:
        model = self.alive.model
        old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        load_into(model, folder)
        if self.left_out is not None:
            model.state_dict()[self.left_out].copy_(old[self.left_out])

    async def die(self, reason: str = "was killed") -> None:
        assert self._death is not None
        self._death.set_result(reason)
        await self.alive.close()

    async def ended(self) -> str:
        assert self._death is not None
        return await asyncio.shield(self._death)

    async def generate(self, tokens: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        self.requests.append(options.get("session"))
        await self._maybe_hang("generate")
        assert self._death is not None
        try:
            return await self.alive.generate(tokens, sampling, **options)
        except EngineError:
            if self._death.done():
                raise EngineError(self._death.result()) from None
            raise

    async def score(self, tokens: Sequence[int], *, media: Sequence[MediaSpan] = ()) -> list[float]:
        await self._maybe_hang("score")
        return await self.alive.score(tokens, media=media)

    async def fork(self, session: str, into: str) -> None:
        await self.alive.fork(session, into)

    async def release(self, session: str) -> None:
        await self.alive.release(session)

    async def abort(self, session: str) -> None:
        await self.alive.abort(session)

    async def pause(self) -> None:
        await self._maybe_hang("pause")
        await self.alive.pause()

    async def resume(self) -> None:
        await self.alive.resume()

    async def forget(self) -> None:
        await self.alive.forget()

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()

    async def _maybe_hang(self, call: str) -> None:
        if self.hangs_at == call:
            await asyncio.get_running_loop().create_future()
