"""An engine's settings and counters, and the engines that a run can sample from, by name.

An engine of another package registers itself as those of Ludus do, by an entry point:

    [project.entry-points."ludus.engines"]
    sglang = "our_package.sglang:SglangEngine"

The object is called with an `EngineSetup` and gives a `core.generation.Engine`; `cluster.engine` names it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from ludus.core.config import Config
from ludus.core.registry import Registry
from ludus.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import nn


class EngineConfig(Config):
    """How much the engine does at once. Device and dtype are those of the model."""

    max_running: int = Field(default=256, ge=1, le=1 << 16)
    """How many requests are computed together (vLLM's `max_num_seqs`)."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """The most tokens one step computes (vLLM's `max_num_batched_tokens`); long prompts are cut into chunks of
    what is left. By default 8192 on a GPU, 2048 elsewhere."""
    memory: float | None = Field(default=None, gt=0, le=0.95)
    """The share of memory that the KV cache may take: of what is free on a GPU (0.4 by default; vLLM's
    `gpu_memory_utilization` is of all, weights included), of all that a host has (0.125 by default)."""
    cache_tokens: int | None = Field(default=None, ge=1, le=1 << 28)
    """How many tokens the KV cache holds, instead of a share of memory."""
    release_memory: Literal["auto", "always", "never"] = "auto"
    """Whether a pause hands the KV cache's memory to the trainer: always, never, or when little is free."""
    keep_kv: bool = False
    """Whether requests and sessions in flight keep the KV cache of older weights through an update (staleness >
    0), which saves computing it again and makes what follows the sample of no single policy."""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in one block of the KV cache: the unit of prefix caching."""
    max_waiting: int = Field(default=1024, ge=1)
    """How many requests may wait in the scheduler; further callers wait in the admission queue."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.cache_tokens is not None and self.memory is not None:
            raise ValueError("cache_tokens and memory both say how large the KV cache is: leave one out")
        if self.keep_kv and self.release_memory == "always":
            raise ValueError('release_memory = "always" gives the KV cache away, and keep_kv keeps it')
        if self.tokens_per_step is not None and self.tokens_per_step < self.max_running:
            raise ValueError(
                f"tokens_per_step ({self.tokens_per_step}) must be at least max_running "
                f"({self.max_running}): each running request computes one token in a step"
            )
        return self


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine since its start."""

    requests: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, prompts and generated ones alike."""
    cached_tokens: int = 0
    """Tokens of contexts whose KV was found instead of computed."""
    wasted_tokens: int = 0
    """Tokens sampled for a request that had ended by the time they were known."""
    steps: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    busy_seconds: float = 0.0
    """Time in steps, waiting for their results included."""
    gpu_seconds: float = 0.0
    """Time from a step's first to its last operation on the GPU; 0 on a CPU."""
    graph_replays: int = 0
    """Decode steps that were replayed from a captured graph."""
    graph_captures: int = 0
    capture_seconds: float = 0.0
    memory_handed_back: int = 0
    """How often the cache's memory was given to the trainer."""
    memory_seconds: float = 0.0
    """Time to hand memory back and to regain it."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


ENGINES = Registry("engine", group="ludus.engines")


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings that a run gives to the engine that it makes."""

    model: nn.Module
    """The trainer's module; engines with weights of their own read folders instead."""
    tokenizer: Tokenizer
    config: EngineConfig
    version: int
    """The policy version before the first update."""
    number: int = 0
    """Which of the run's engines this is."""
    address: str | None = None
    """Its server, of those in `cluster.servers`."""
    device: str = "cpu"
    dtype: str = "float32"
    """In what the trainer computes, by torch's name."""
    threads: int | None = None
    """Of a process on the host; as many as torch likes when left out."""
    seconds: float = 600.0
    """`cluster.timeout`: how long it may take to start, to load weights, or to give a sign of life."""
