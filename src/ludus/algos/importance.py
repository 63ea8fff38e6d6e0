"""Importance sampling correction: token weights for samples of a policy other than p_old (TIS, IcePop).

The engine that sampled may hold other weights (stale samples) or compute in another way (foreign kernels,
another number format). Then p_old, which the trainer computes, is not the probability that the sample
had, and the loss of each token is to be weighted by

    w = p_old / p_behaviour

whose product over long sequences explodes. Truncation caps it, which bounds the variance at the price of some
bias; masking drops tokens whose ratio lies outside of a band, taking them as not comparable. Level
"sequence" uses one ratio for all tokens of a row: the product of theirs. Weights carry no gradient.

Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025 (truncated);
Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model", 2025,
arXiv:2510.18855 (masked).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ludus.algos.advantage_inputs import NotNegative, Positive, sum_within
from ludus.algos.losses import LossInputs, Metrics, PolicyLoss, clamped_log_ratio

Level = Literal["token", "sequence"]
Correction = Callable[[LossInputs], Tensor]
"""(inputs) -> weight_A, without gradient; 1 where nothing needs correction."""


def truncated_importance(inputs: LossInputs, *, high: Positive = 2.0, level: Level = "token") -> Tensor:
    """min(w, high)."""
    return _ratio(inputs, level).clamp(max=high)


def masked_importance(
    inputs: LossInputs, *, low: NotNegative = 0.5, high: Positive = 2.0, level: Level = "token"
) -> Tensor:
    """w where low <= w <= high, 0 elsewhere."""
    ratio_A = _ratio(inputs, level)
    return torch.where((ratio_A >= low) & (ratio_A <= high), ratio_A, 0)


def effective_sample_size(mean: float, mean_square: float, count: float = 1.0) -> float:
    """The effective sample size of importance weights as a share of the samples: (sum w)^2 / (n * sum w^2).

    1 where all weights are equal, 1 / n where a single one has it all. Given are the means of w and of w^2, or
    sums of both and the count n. Kong, "A Note on Importance Sampling using Standardized Weights", 1992.
    """
    return mean**2 / (count * mean_square)


def corrected(loss: PolicyLoss, correction: Correction) -> PolicyLoss:
    """The loss, each token weighted by its correction."""
    level: Level = getattr(correction, "keywords", {}).get("level", "token")

    def weighted(inputs: LossInputs) -> tuple[Tensor, Metrics]:
        loss_A, metrics = loss(inputs)
        weight_A = correction(inputs)
        cut_A = (weight_A != _ratio(inputs, level)).to(weight_A.dtype)
        return loss_A * weight_A, metrics | {"importance_weight": weight_A, "importance_cut": cut_A}

    return weighted


def _ratio(inputs: LossInputs, level: Level) -> Tensor:
    if inputs.rollout_logprobs_A is None:
        return torch.ones_like(inputs.old_logprobs_A)
    difference_A = (inputs.old_logprobs_A - inputs.rollout_logprobs_A).detach()
    if level == "sequence":
        difference_A = sum_within(difference_A, inputs.row_A)[inputs.row_A]
    return clamped_log_ratio(difference_A).exp()
