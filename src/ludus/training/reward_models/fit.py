"""Training a reward model on pairs or on scored steps (`objectives.py`).

The loss is a function of the scores of whole conversations, and pairs do not share a micro-batch. So a first
pass without gradient finds all scores, the loss's derivative by each of them weights a second pass, and the
gradient is the formula's whatever the micro-batches. Measured are pairs and episodes that were held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from ludus.core.config import Config
from ludus.core.failures import ConfigError
from ludus.core.random import key, shuffled
from ludus.observe import Estimate
from ludus.training.config.model import ModelConfig
from ludus.training.config.stages import CRITIC_RATES, OptimizerConfig
from ludus.training.data.conversations import (
    Conversation,
    Preference,
    ScoredSteps,
    read_preferences,
    read_scored_steps,
)
from ludus.training.data.micro_batches import MicroBatch, micro_batches
from ludus.training.data.task_sampler import items_of_step
from ludus.training.models.loading import load_model
from ludus.training.optim.learner import Updater
from ludus.training.reward_models.model import RewardModel, save_reward_model
from ludus.training.reward_models.objectives import (
    E,
    PreferenceObjective,
    RewardObjective,
    StepObjective,
    conversations_of,
)

_FITTED_TO = 256
"""How many examples a tokenizer made from scratch is fitted to."""
OnRewardStep = Callable[[int, int, dict[str, float]], None]
"""Called as (step, steps, metrics)."""


class RewardModelConfig(Config):
    """How a reward model is trained."""

    model: ModelConfig
    """The model that it starts from."""
    steps: int = Field(default=200, ge=1)
    """Optimizer steps."""
    batch: int = Field(default=16, ge=1)
    """Pairs, or episodes with scored steps, in a step."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the data that is measured on and not learned from."""
    format: str = "hermes"
    """How tool calls are written for it (agent.format)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings; the learning rate is that of a critic when left out."""
    seed: int = 0
    """Which data are held out, and in which order they come."""


@dataclass(frozen=True, slots=True)
class RewardModelResult:
    """The folder of the model, and its metrics on held-out data."""

    folder: Path
    kind: str
    measured: dict[str, Estimate]
    """By head: of preferences the share of verdicts that it agrees with, of steps the correlation with their
    scores."""
    counts: dict[str, int]
    """Held-out verdicts, or steps, by head."""
    trained_on: int
    """Pairs, or episodes."""


def fit_reward_model(
    data: str | Path | Sequence[Preference] | Sequence[ScoredSteps],
    folder: str | Path,
    config: RewardModelConfig,
    on_step: OnRewardStep | None = None,
) -> RewardModelResult:
    """Train a reward model on pairs or scored steps, measure it, and write it into `folder`.

    Args:
        data: Pairs (a file as DPO reads it, `dimensions` beside `chosen` and `rejected` where there are some),
            or scored steps (`messages` and `scores`, or a Parquet file of episodes whose turns were scored).
        folder: Where it goes; it must not exist.
        config: What it starts from, and how it learns.
        on_step: Called after every step.
    """
    path = Path(folder)
    if path.exists():
        raise ConfigError(f"{path} exists already: give another folder, or remove it")
    items = _read(data) if isinstance(data, str | Path) else list(data)
    pairs = [one for one in items if isinstance(one, Preference)]
    if pairs:
        return _fit(pairs, PreferenceObjective, path, config, on_step)
    return _fit(
        [one for one in items if isinstance(one, ScoredSteps)], StepObjective, path, config, on_step
    )


def _fit(
    items: list[E],
    objective_of: Callable[[Sequence[E]], RewardObjective[E]],
    path: Path,
    config: RewardModelConfig,
    on_step: OnRewardStep | None,
) -> RewardModelResult:
    if len(items) < 2:
        raise ConfigError(f"a reward model needs at least two examples, and there are {len(items)}")
    order = shuffled(len(items), key(config.seed, "held out"))
    held = max(1, round(config.held_out * len(items)))
    held_out, trained = [items[i] for i in order[:held]], [items[i] for i in order[held:]]
    if not trained:
        raise ConfigError(f"of {len(items)} examples {held} are held out: nothing is left to learn from")
    texts = [m.content for c in conversations_of(trained[:_FITTED_TO]) for m in c]
    model, tokenizer = load_model(config.model, config.seed, texts)
    objective = objective_of(trained)
    reward_model = RewardModel(model, tokenizer, objective.about(config.format))
    _train(reward_model, objective, trained, config, on_step or (lambda step, steps, metrics: None))
    reward_model.about = objective.centred(reward_model, trained)
    measured, counts = objective.measure(reward_model, held_out)
    save_reward_model(path, reward_model)
    return RewardModelResult(path, reward_model.about.kind, measured, counts, len(trained))


def _read(source: str | Path) -> list[Preference] | list[ScoredSteps]:
    """By its columns: pairs have `chosen`, and everything else has scores."""
    if str(source).endswith(".parquet"):
        return read_scored_steps(source)
    with Path(source).open(encoding="utf-8", errors="replace") as file:
        first = file.readline(1_000_000)
    return read_preferences(source) if '"chosen"' in first else read_scored_steps(source)


def _train(
    model: RewardModel,
    objective: RewardObjective[E],
    trained: Sequence[E],
    config: RewardModelConfig,
    on_step: OnRewardStep,
) -> None:
    optimizer = config.optimizer.for_model(CRITIC_RATES, config.model)
    updater = Updater(model, optimizer, config.steps, config.seed)
    for step in range(config.steps):
        items = items_of_step(trained, step, config.batch, config.seed)
        conversations = conversations_of(items)
        model.eval()
        scores = model.score(conversations)
        gradients, loss = objective.gradient(scores, items)
        metrics = _descend(updater, model, conversations, gradients)
        on_step(step + 1, config.steps, {"loss": loss, "gradient_norm": metrics["gradient_norm"]})
    model.eval()


def _descend(
    updater: Updater,
    model: RewardModel,
    conversations: Sequence[Conversation],
    gradients: Sequence[Tensor],
) -> dict[str, float]:
    """One optimizer step along the given derivatives by the scores of each conversation's actions."""
    batch, place_A, _ = model.rows(conversations)
    gradient_TH = torch.zeros(len(batch.tokens_T), gradients[0].shape[1])
    gradient_TH = gradient_TH.index_add(0, place_A, torch.cat(list(gradients)))

    def loss(part: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        scores_AH = model.scores_at(part)
        return (scores_AH * gradient_TH[part.source_index_A.cpu()].to(scores_AH)).sum(1), {}

    batch = replace(batch, weights_T=batch.trained_T.float())
    budget = updater.micro_batch_tokens(batch.lengths)
    return updater.optimizer_step(micro_batches(batch, budget, share=updater.shares_prefixes), loss)
