"""A model whose weights stay as they are, on an engine of its own: for judges and writers of data."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

from ludus.chat import Renderer, format_for
from ludus.core.generation import ChatOptions, ChatReply
from ludus.core.messages import Message
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.model import use_ludus_attention
from ludus.remote.client import PerLoop
from ludus.rollouts.recorder import EngineChatModel
from ludus.training.config.run import ModelConfig
from ludus.training.models.loading import check_source, load_model

_MEMORY = 0.1
"""The share of memory for its KV cache: the policy's engine needs more."""

_loading = threading.Lock()


def load_frozen(name: str) -> FrozenModel:
    """The model of this folder or hub name, loaded once in a process."""
    with _loading:  # two threads that ask at once would load it twice
        return _load(name)


@cache
def _load(name: str) -> FrozenModel:
    return FrozenModel(name)


class FrozenModel:
    """A `ChatModel` of its own weights. Each event loop that asks has an engine, which ends with the loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        source = ModelConfig(name=name)
        check_source(source)
        self._model, self._tokenizer = load_model(source, seed=0)
        use_ludus_attention(self._model)
        self._renderer = Renderer(self._tokenizer, format_for(self._tokenizer, "auto"), history="keep")
        self._engines = PerLoop(self._engine)

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        engine = await self._engines.get()
        return await EngineChatModel(engine, self._renderer, self.name).chat(messages, options)

    async def close(self) -> None:
        await self._engines.close()

    def _engine(self) -> EmbeddedEngine:
        return EmbeddedEngine(self._model, self._tokenizer, EngineConfig(memory=_MEMORY))
