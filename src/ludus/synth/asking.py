"""Asking language models: questions with checked JSON answers, episodes as text, and what was spent."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ludus.core.generation import ChatModel, ChatOptions, ChatReply
from ludus.core.messages import Json, Message
from ludus.llm import ask_json
from ludus.synth.result import current_cost

T = TypeVar("T")
ModelSpec = str | dict[str, Any]
"""How settings name a language model: an address, a table with an address and limits, or "policy"."""
POLICY = "policy"
"""The name of the model that plays the episodes, where it is asked for text."""


async def ask(
    model: ChatModel,
    system: str,
    given: str | Json,
    kind: type[T],
    options: ChatOptions = ChatOptions(),  # noqa: B008 - frozen
    *,
    check: Callable[[T], object] | None = None,
) -> T:
    """The answer to instructions about `given`, as a `kind` that passes `check`; a table is given as JSON."""
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
    asked = [Message("system", system), Message("user", text)]
    return (await ask_json(model, asked, kind, options, check=check)).value


def transcript(messages: Sequence[Message], asked: int = 0, most: int = 24_000) -> str:
    """A conversation as text for a language model; the middle of a long one is left out.

    The first `asked` messages are the task's: none of them is a step of the agent.
    """
    steps, lines = 0, []
    for place, message in enumerate(messages):
        is_step = message.role == "assistant" and place >= asked
        steps += is_step
        label = f"step {steps}, the agent" if is_step else message.role
        lines.append(f"[{label}]\n{message.content}")
    text = "\n".join(lines)
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - most} characters left out ...]\n{text[-half:]}"


class MeteredModel:
    """A language model whose calls are counted."""

    def __init__(self, inner: ChatModel) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    async def chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> ChatReply:
        reply = await self._inner.chat(messages, options or ChatOptions())
        cost = current_cost.get()
        if cost is not None and reply.is_cached:
            cost.cached_calls += 1
        elif cost is not None:
            cost.model_calls += 1
            cost.prompt_tokens += reply.prompt_tokens
            cost.completion_tokens += reply.completion_tokens
        return reply

    async def close(self) -> None:
        await self._inner.close()
