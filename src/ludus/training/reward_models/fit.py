"""Training a reward model on pairs or on scored steps.

The loss is a function of the scores of whole conversations, and pairs do not share a micro-batch. So a first
pass without gradient finds all scores, the loss's derivative by each of them weights a second pass, and the
gradient is the formula's whatever the micro-batches. Measured are pairs and episodes that were held out.

**Preferences.** Bradley-Terry with one head per dimension: P(chosen over rejected) = sigmoid(s(chosen) -
s(rejected)), and the loss -log P, for each head that a pair has a verdict on; a tie counts half for each side
(Bradley & Terry, "Rank analysis of incomplete block designs", 1952). The head `overall` learns from which of
the two was chosen, the others from the pair's `dimensions`.

**Steps.** A regression on the score of each action (a process reward model, as Web-Shepherd's, 2025,
arXiv:2505.15277): the mean squared error at the end of every action that has a score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from ludus.core.config import Config
from ludus.core.failures import ConfigError
from ludus.core.random import key, shuffled
from ludus.observe import Estimate, mean_interval
from ludus.training.config.run import ModelConfig
from ludus.training.config.stages import CRITIC_RATES, OptimizerConfig
from ludus.training.data.conversations import (
    Conversation,
    Preference,
    ScoredSteps,
    read_preferences,
    read_scored_steps,
)
from ludus.training.data.micro_batches import MicroBatch, micro_batches
from ludus.training.data.tasks import items_of_step
from ludus.training.models.loading import load_model
from ludus.training.optim.learner import Updater
from ludus.training.reward_models.model import AboutHeads, RewardModel, save_reward_model

OVERALL, STEP = "overall", "step"
E = TypeVar("E", Preference, ScoredSteps)
E_contra = TypeVar("E_contra", Preference, ScoredSteps, contravariant=True)
_CENTRED_ON = 512
"""How many examples the average score is taken over."""


class RewardObjective(Protocol[E_contra]):
    """Objective of a reward model for one kind of data."""

    def about(self, format: str) -> AboutHeads:
        """The heads that it needs."""

    def gradient(
        self, scores: Sequence[Tensor], items: Sequence[E_contra]
    ) -> tuple[list[Tensor], float]:
        """The derivative of the loss by each conversation's [actions, heads] scores, and the loss."""

    def measure(
        self, model: RewardModel, held_out: Sequence[E_contra]
    ) -> tuple[dict[str, Estimate], dict[str, int]]:
        """By head: how good it is on these, and how many verdicts or steps that is measured on."""

    def centred(self, model: RewardModel, trained: Sequence[E_contra]) -> AboutHeads:
        """The heads with what counts as average."""


def conversations_of(items: Sequence[E]) -> list[Conversation]:
    """All conversations of some examples, in order."""
    return [conversation for one in items for conversation in one.conversations]


class PreferenceObjective:
    """Pairs: two conversations each, Bradley-Terry."""

    def __init__(self, pairs: Sequence[Preference]) -> None:
        self.heads = (OVERALL, *dict.fromkeys(name for pair in pairs for name in pair.dimensions))

    def about(self, format: str) -> AboutHeads:
        means = (0.0,) * len(self.heads)
        return AboutHeads(kind="preference", heads=self.heads, means=means, format=format)

    def verdicts(self, pair: Preference) -> list[float | None]:
        """For each head 1 where the chosen one is better, 0 where the other is, 0.5 for a tie."""
        return [1.0, *(pair.dimensions.get(name) for name in self.heads[1:])]

    def gradient(
        self, scores: Sequence[Tensor], pairs: Sequence[Preference]
    ) -> tuple[list[Tensor], float]:
        """The derivative of the loss by each conversation's [actions, heads] scores, and the loss."""
        leaves = [one.clone().requires_grad_() for one in scores]
        last_NH = torch.stack([one[-1] for one in leaves])
        margin_PH = last_NH[0::2] - last_NH[1::2]
        told = [self.verdicts(pair) for pair in pairs]
        known_PH = torch.tensor([[one is not None for one in row] for row in told])
        wanted_PH = torch.tensor([[0.5 if one is None else one for one in row] for row in told])
        loss_PH = -(wanted_PH * logsigmoid(margin_PH) + (1 - wanted_PH) * logsigmoid(-margin_PH))
        loss = (loss_PH * known_PH).sum() / known_PH.sum()
        return list(torch.autograd.grad(loss, leaves)), float(loss.detach())

    def measure(
        self, model: RewardModel, held_out: Sequence[Preference]
    ) -> tuple[dict[str, Estimate], dict[str, int]]:
        last_NH = torch.stack([one[-1] for one in model.score(conversations_of(held_out))])
        margin_PH = last_NH[0::2] - last_NH[1::2]
        told = [self.verdicts(pair) for pair in held_out]
        measured: dict[str, Estimate] = {}
        counts: dict[str, int] = {}
        for place, name in enumerate(self.heads):
            right = [
                float((float(margin_PH[i, place]) > 0) == (row[place] == 1.0))
                for i, row in enumerate(told)
                if row[place] in (0.0, 1.0)
            ]
            counts[name] = len(right)
            if right:
                measured[name] = mean_interval(right, within=(0.0, 1.0))
        return measured, counts

    def centred(self, model: RewardModel, trained: Sequence[Preference]) -> AboutHeads:
        """Scores are known up to a constant: 0 is what an average episode has."""
        last_NH = torch.stack([one[-1] for one in model.score(conversations_of(trained[:_CENTRED_ON]))])
        return model.about.model_copy(update={"means": tuple(last_NH.mean(0).tolist())})


class StepObjective:
    """Episodes whose actions have scores: a regression."""

    def __init__(self, episodes: Sequence[ScoredSteps]) -> None:
        known = [score for one in episodes for score in one.scores if score is not None]
        if not known:
            raise ConfigError("no step has a score: there is nothing to learn from")
        self._range = min(known), max(known)

    def about(self, format: str) -> AboutHeads:
        low, high = self._range
        return AboutHeads(
            kind="step", heads=(STEP,), means=(0.0,), lowest=low, highest=high, format=format
        )

    def gradient(
        self, scores: Sequence[Tensor], episodes: Sequence[ScoredSteps]
    ) -> tuple[list[Tensor], float]:
        leaves = [one.clone().requires_grad_() for one in scores]
        errors = [
            (leaf[i, 0] - score) ** 2
            for leaf, episode in zip(leaves, episodes, strict=True)
            for i, score in enumerate(episode.scores)
            if score is not None
        ]
        if not errors:
            return [torch.zeros_like(one) for one in leaves], 0.0
        loss = torch.stack(errors).mean()
        return list(torch.autograd.grad(loss, leaves)), float(loss.detach())

    def measure(
        self, model: RewardModel, held_out: Sequence[ScoredSteps]
    ) -> tuple[dict[str, Estimate], dict[str, int]]:
        pairs = [
            (float(found[i, 0]), score)
            for found, episode in zip(model.score(conversations_of(held_out)), held_out, strict=True)
            for i, score in enumerate(episode.scores)
            if score is not None
        ]
        if len({given for _, given in pairs}) < 2:
            return {}, {STEP: len(pairs)}
        correlation = torch.corrcoef(torch.tensor(pairs, dtype=torch.float64).T)[0, 1]
        return {STEP: Estimate(float(correlation.nan_to_num()))}, {STEP: len(pairs)}

    def centred(self, model: RewardModel, trained: Sequence[ScoredSteps]) -> AboutHeads:
        return model.about


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
