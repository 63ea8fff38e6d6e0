"""An engine of another package: transformers' own forward pass, one request at a time, without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludus.core import EngineError
from ludus.core.generation import (
    Completion,
    Engine,
    FinishReason,
    OnTokens,
    Sampling,
    VersionSpan,
    first_stop,
)
from ludus.core.messages import MediaSpan
from ludus.core.random import key, uniforms
from ludus.engine import EngineSetup


class PlainEngine(Engine):
    """Weights of its own, loaded from folders. It reads text only, and samples from full distributions."""

    def __init__(self, setup: EngineSetup) -> None:
        self._dtype, self._version, self._is_closed = getattr(torch, setup.dtype), -1, False

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def takes_images(self) -> bool:
        return False

    async def load_weights(self, folder: Path, version: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=self._dtype)
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self._version = version

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        if self._is_closed:
            raise EngineError("the engine is closed", retriable=False)
        context, found, logprobs = list(tokens), [], []
        finish, stop = FinishReason.LENGTH, None
        while len(found) < sampling.max_tokens:
            logits = self._logits(context)[-1] / (sampling.temperature or 1.0)
            distribution = torch.log_softmax(logits, -1)
            drawn = int(logits.argmax())
            if sampling.temperature:
                number = uniforms(key(sampling.seed, len(context)), np.arange(1))[0]
                drawn = int(torch.searchsorted(distribution.exp().cumsum(-1), number))
                drawn = min(drawn, len(distribution) - 1)
            context.append(drawn)
            found.append(drawn)
            logprobs.append(float(distribution[drawn]))
            if drawn in sampling.stop_tokens:
                finish = FinishReason.STOP_TOKEN
                break
            if (met := first_stop(self._tokenizer.decode(found), sampling.stop)) is not None:
                finish, stop = FinishReason.STOP_STRING, met[1]
                break
        return Completion(found, logprobs, finish, (VersionSpan(0, self._version),), stop)

    async def score(self, tokens: Sequence[int], *, media: Sequence[MediaSpan] = ()) -> list[float]:
        distributions = torch.log_softmax(self._logits(list(tokens))[:-1], -1)
        return [0.0, *distributions.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()]

    @torch.no_grad()
    def _logits(self, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0].float()
        return logits

    async def close(self) -> None:
        self._is_closed = True
