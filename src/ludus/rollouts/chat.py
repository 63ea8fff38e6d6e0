"""`EngineChatModel`: a model on an engine answers messages, the policy itself among others.

Nothing of it is recorded or trained on: a question is a request of its own, with no session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ludus.chat.renderer import Renderer
from ludus.core.chat import ChatModel, ChatOptions, ChatReply, policy_model
from ludus.core.failures import EngineError
from ludus.core.generation import Engine, FinishReason, Sampling
from ludus.core.images import ImageError
from ludus.core.messages import Message
from ludus.core.random import key
from ludus.llm import ChatError
from ludus.remote.threads import run_sync
from ludus.rollouts.recorder import SamplingGate


class EngineChatModel:
    """A `ChatModel` on an engine. With a temperature above 0 and no seed, the question decides the answer."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        name: str = "policy",
        *,
        seconds: float = 600.0,
        gate: SamplingGate | None = None,
    ) -> None:
        self._engine, self._renderer = engine, renderer
        self._gate = gate or SamplingGate()
        self._name, self._seconds = name, seconds

    @property
    def name(self) -> str:
        """With the version of the weights: what another version said is another answer."""
        return f"{self._name}@{self._engine.policy_version}"

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        if self._renderer.images is None and any(message.media for message in messages):
            raise ChatError(f"{self._name} reads text only, and is asked about an image")
        try:
            opening = await run_sync(self._renderer.opening, messages)
        except ImageError as error:
            raise ChatError(f"{self._name} cannot be asked: {error}") from error
        prompt = opening.tokens
        seed = (
            key(*prompt, *(one.sha256 for one in opening.media))
            if options.seed is None
            else options.seed
        )
        sampling = Sampling(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            stop_tokens=tuple(self._renderer.tokenizer.stop_tokens),
            seed=seed,
        )
        await self._gate.passed()
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                completion = await self._engine.generate(prompt, sampling, media=opening.media)
        except EngineError as error:
            raise ChatError(f"{self._name} cannot be asked: {error}") from error
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise ChatError(f"{self._name} gave no answer within {self._seconds:g} seconds") from error
        if completion.finish is FinishReason.ABORTED:
            raise ChatError(f"{self._name}: the engine aborted the request")
        return ChatReply(
            self._renderer.text_of(completion),
            prompt_tokens=len(prompt),
            completion_tokens=len(completion.tokens),
            is_cut=completion.finish is FinishReason.LENGTH,
        )

    async def close(self) -> None:
        """Nothing to close: the engine has another owner."""


@contextmanager
def asking_policy(model: ChatModel) -> Iterator[None]:
    """While this is entered, `model = "policy"` is this model."""
    token = policy_model.set(model)
    try:
        yield
    finally:
        policy_model.reset(token)
