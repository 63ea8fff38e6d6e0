"""Objectives of reward models: the loss of the scores, the metrics, and the heads.

**Preferences.** Bradley-Terry with one head per dimension: P(chosen over rejected) = sigmoid(s(chosen) -
s(rejected)), and the loss -log P, for each head that a pair has a verdict on; a tie counts half for each side
(Bradley & Terry, "Rank analysis of incomplete block designs", 1952). The head `overall` learns from which of
the two was chosen, the others from the pair's `dimensions`.

**Steps.** A regression on the score of each action (a process reward model, as Web-Shepherd's, 2025,
arXiv:2505.15277): the mean squared error at the end of every action that has a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ludus.core.failures import ConfigError
from ludus.observe import Estimate, mean_interval
from ludus.training.data.conversations import Conversation, Preference, ScoredSteps
from ludus.training.reward_models.model import AboutHeads, RewardModel

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
