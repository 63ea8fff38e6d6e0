"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made."""

    requests: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, prompts and generated ones alike."""
    cached_tokens: int = 0
    """Tokens of contexts whose KV was found instead of computed."""
    wasted_tokens: int = 0
    """Tokens that were drawn for a request which had ended by the time they were known."""
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
