"""The few settings of the embedded engine."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.core.config import Config


class EngineConfig(Config):
    """How much the engine does at once. Device and dtype are those of the model."""

    max_running: int = Field(default=256, ge=1, le=1 << 16)
    """How many requests are computed together."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """The most tokens one step computes; long prompts are cut into chunks of what is left. By default 8192 on a
    GPU, 2048 elsewhere."""
    memory: float | None = Field(default=None, gt=0, le=0.95)
    """The share of memory that the KV cache may take: of what is free on a GPU (0.4 by default), of all that
    a host has (0.125 by default)."""
    cache_tokens: int | None = Field(default=None, ge=1, le=1 << 28)
    """How many tokens the KV cache holds, instead of a share of memory."""
    release_memory: Literal["auto", "always", "never"] = "auto"
    """Whether a pause hands the KV cache's memory to the trainer: always, never, or when little is free."""
    page_size: int = Field(default=16, ge=1, le=1024)
    """How many tokens one page of the KV cache holds: the unit of sharing."""
    max_waiting: int = Field(default=1024, ge=1)
    """How many requests may queue for a place in the batch; further callers wait to be let in."""

    @model_validator(mode="after")
    def _says_the_size_once(self) -> Self:
        if self.cache_tokens is not None and self.memory is not None:
            raise ValueError("cache_tokens and memory both say how large the KV cache is: leave one out")
        return self

    @model_validator(mode="after")
    def _every_row_gets_a_token(self) -> Self:
        if self.tokens_per_step is not None and self.tokens_per_step < self.max_running:
            raise ValueError(
                f"tokens_per_step ({self.tokens_per_step}) must be at least max_running "
                f"({self.max_running}): each running request computes one token in a step"
            )
        return self
