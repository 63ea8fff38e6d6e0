"""[sampling], [evaluation] and [run]: how a run samples, measures, and what it writes down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from ludus.core.config import Config, Place, ShortConfig
from ludus.core.generation import COLDEST, HOTTEST, Sampling

_TRUNCATION = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
"""Sampling settings that importance ratios rule out, and the values with which they do nothing."""


class SamplingConfig(Config):
    """How actions are drawn while training. There is no truncation: ratios would be wrong."""

    temperature: float = Field(default=1.0, ge=COLDEST, le=HOTTEST)
    """Divides the logits, in sampling and in the trained distribution alike."""

    @model_validator(mode="before")
    @classmethod
    def _untruncated(cls, raw: Any) -> Any:
        """Settings that would truncate the distribution are refused, unless they are switched off."""
        if not isinstance(raw, Mapping):
            return raw
        if any(raw.get(name, off) != off for name, off in _TRUNCATION.items()):
            raise ValueError(
                "top_p, top_k, min_p and repetition_penalty draw from another distribution than the one "
                "that is trained, which makes importance ratios wrong; leave them out of an RL recipe "
                "(temperature is fine; [evaluation], `ludus eval` and `ludus rollout` accept all of them)"
            )
        return {name: value for name, value in raw.items() if name not in _TRUNCATION}


class EvaluationSampling(Config):
    """How tokens are drawn in evaluations. Nothing is trained on them, so truncation is allowed."""

    temperature: float = Field(default=1.0, ge=0, le=HOTTEST)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the most likely tokens of this mass."""
    top_k: int = Field(default=0, ge=0)
    """Draw from so many of the most likely tokens; 0 is all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Least share of the best token's likelihood."""
    repetition_penalty: float = Field(default=1.0, ge=0.001, le=1000)
    """Above 1, tokens that have occurred are less likely."""

    @property
    def sampling(self) -> Sampling:
        """These settings as an engine takes them."""
        return Sampling(**{name: getattr(self, name) for name in EvaluationSampling.model_fields})


class EvaluationConfig(EvaluationSampling):
    """When and how to measure on held-out tasks."""

    every: int = Field(default=0, ge=0)
    """Evaluate after so many steps of a stage that learns; 0 is only at the start and after each of them."""
    best_by: Literal["success", "reward"] = "success"
    """The held-out number whose highest value marks the best checkpoint, which is kept; then the reward."""
    patience: int | None = Field(default=None, ge=1)
    """End a stage (rl, dpo, distill) after so many evaluations in a row without a new best (by best_by)."""
    tasks: int | None = Field(default=None, ge=1)
    """How many of the held-out tasks; all when left out."""
    attempts: int = Field(default=1, ge=1)
    """Episodes for each task."""

    @model_validator(mode="after")
    def _can_stop(self) -> EvaluationConfig:
        if self.patience is not None and not self.every:
            raise ValueError(
                "evaluation.patience counts evaluations within a stage, and there are none: set "
                "evaluation.every"
            )
        return self


class WandbConfig(ShortConfig):
    """Weights & Biases (extra: wandb): what the run is called there."""

    short = "project"

    project: str
    """The project that the run is logged to."""
    name: str | None = None
    """The run's name there; that of its folder when left out."""
    entity: str | None = None
    """The user or team that owns the project."""
    group: str | None = None
    """A group of runs, such as the seeds of one recipe."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


class RunConfig(Config):
    """The run's outputs: where, what and how often."""

    folder: Place | None = None
    """The run's folder; runs/NAME-COUNTER when left out."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between checkpoints; there is always one after a stage, at the end and on Ctrl-C."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay; the best, and the last of every stage that learns, stay too."""
    trajectories_every: int = Field(default=1, ge=0)
    """Write the episodes of every so many steps; 0 writes none."""
    audit: bool | None = None
    """Write every tool call to audit.jsonl; left out, where tools of MCP servers are used (docs/mcp.md)."""
    renders: bool = False
    """Also record what environments look like before each turn (images, maps): ludus view shows it."""
    replay: Place | None = None
    """Train from the groups that the run in this folder recorded, and play nothing (ludus train --replay
    RUN)."""
    tensorboard: bool = False
    """Also write TensorBoard events (extra: tensorboard)."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases (extra: wandb): "PROJECT", or { project = "PROJECT", tags = ["a"], ... }."""
    sinks: tuple[str, ...] = ()
    """Also send metrics to what these functions open, such as 'file.py:open_sink' (docs/observe.md)."""

    @property
    def all_sinks(self) -> list[str]:
        """The sinks by the names that `ludus.observe.SINKS` knows."""
        chosen = {"tensorboard": self.tensorboard, "wandb": self.wandb is not None}
        return [*(name for name, wanted in chosen.items() if wanted), *self.sinks]
