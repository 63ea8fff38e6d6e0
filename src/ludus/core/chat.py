"""Asking a language model for text: what judges, rubrics, synthesis and simulated users need of one.

A `ChatModel` is any model that answers messages: behind an OpenAI-compatible address (`ludus.llm`), or the
embedded engine and with it the policy itself (`EngineChatModel`). What is asked here is never trained on, so it
is text in and text out; episodes, whose tokens are trained on, go through `Engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ludus.core.messages import Message


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to answer."""

    max_tokens: int = 1024
    temperature: float = 0.0
    seed: int | None = None
    wants_json: bool = False
    """Ask the server for a JSON object where it can promise one; the answer is checked all the same."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """An answer, and what it took."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0
    """By the prices that were given."""
    is_cut: bool = False
    """Whether it ended at `max_tokens`."""
    is_cached: bool = False
    """Whether it was found instead of asked for, and cost nothing."""


@runtime_checkable
class ChatModel(Protocol):
    """Something that answers messages."""

    @property
    def name(self) -> str:
        """Name of the model in reports, logs and cache keys."""

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ...) -> ChatReply:
        """Answer; raises `InfraError` where no answer can be had."""

    async def close(self) -> None:
        """Release connections; safe to call twice."""


policy_model: ContextVar[ChatModel | None] = ContextVar("policy_model", default=None)
"""The model that is trained or evaluated, while its episodes are scored; None outside of a run."""
