"""A simulated load and cluster, and what comes of a simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field, model_validator

from ludus.core.config import Config


class SimulationConfig(Config):
    """A load and a cluster. The defaults are a 1.5B model on one H200 (docs/performance.md)."""

    tasks: int = Field(default=32, ge=1)
    """Groups in a step."""
    attempts: int = Field(default=8, ge=1)
    """Episodes in a group."""
    steps: int = Field(default=8, ge=1)
    """Steps to simulate."""
    staleness: int = Field(default=1, ge=0)
    """As rl.staleness; 0 waits for every episode of a step."""
    staleness_window: int = Field(default=1, ge=1)
    """As rl.staleness_window."""
    engines: int = Field(default=1, ge=1)
    """GPUs that play."""
    trainers: int = Field(default=0, ge=0)
    """GPUs that train; 0: the engines' own, while they are paused."""
    turns: tuple[int, int] = (3, 6)
    """Fewest and most turns of an episode."""
    prompt_tokens: int = Field(default=400, ge=0)
    """Tokens of a task."""
    turn_tokens: int = Field(default=120, ge=1)
    """Mean tokens of an action; they are spread exponentially."""
    observation_tokens: int = Field(default=100, ge=0)
    """Tokens of what a tool returns."""
    tool_seconds: float = Field(default=0.5, ge=0)
    """Mean seconds of a tool."""
    tool_sigma: float = Field(default=1.0, ge=0)
    """Spread of the logarithm of a tool's seconds."""
    hang_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the calls that hang until their deadline."""
    hang_seconds: float = Field(default=30.0, ge=0)
    """Seconds until that deadline."""
    max_requests: int = Field(default=256, ge=1)
    """Requests that an engine runs at once; others wait in line."""
    decode_seconds: float = Field(default=0.0018, gt=0)
    """Seconds of a decoding step of one request."""
    request_seconds: float = Field(default=0.000006, ge=0)
    """Seconds that each further request adds to it."""
    prompt_tokens_per_second: float = Field(default=150_000.0, gt=0)
    """How fast an engine reads prompts."""
    train_tokens_per_second: float = Field(default=50_000.0, gt=0)
    """How fast one GPU trains."""
    train_seconds: float = Field(default=0.3, ge=0)
    """Fixed seconds of an update, whatever its size."""
    train_efficiency: float = Field(default=0.95, gt=0, le=1)
    """Share of each GPU's speed that remains at every doubling of the GPUs that train."""
    pause_seconds: float = Field(default=0.02, ge=0)
    """Seconds to pause and resume the engines."""
    weight_gb: float = Field(default=3.1, ge=0)
    """Size of the weights."""
    sync_gb_per_second: float = Field(default=8.0, gt=0)
    """How fast the weights reach all engines; nothing is sent where the engines' own GPUs train."""
    engine_mtbf_seconds: float | None = Field(default=None, gt=0)
    """Mean time between the deaths of an engine."""
    restart_seconds: float = Field(default=30.0, ge=0)
    """Until a dead engine plays again."""
    seed: int = 0
    """Seed of every draw."""

    @model_validator(mode="after")
    def _has_turns(self) -> SimulationConfig:
        fewest, most = self.turns
        if not 1 <= fewest <= most:
            raise ValueError(f"turns = [{fewest}, {most}] must be the fewest and the most, at least 1")
        return self

    def update_seconds(self, tokens: int) -> float:
        """How long an update on so many tokens takes."""
        gpus = self.trainers or self.engines
        speed: float = self.train_tokens_per_second * gpus * self.train_efficiency ** math.log2(gpus)
        return self.train_seconds + tokens / speed

    @property
    def sync_seconds(self) -> float:
        return self.pause_seconds + (self.weight_gb / self.sync_gb_per_second if self.trainers else 0.0)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Results of a simulation. Rates leave out the first step, in which the pipeline fills."""

    seconds: float
    steps: int
    step_seconds: float
    episodes_per_second: float
    tokens_per_second: float
    """Trained tokens."""
    engine_busy: float
    """Share of the engines' time in which they had requests and ran."""
    trainer_busy: float
    lag_mean: float
    lag_max: int
    lag_bound: int
    deaths: int
    given_up: int
    """Groups that failed too often."""
    controller_seconds: float
    """CPU seconds of the controller, the simulation included, for each group."""
