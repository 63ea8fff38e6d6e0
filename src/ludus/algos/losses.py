"""Policy losses: pure functions from log-probabilities and advantages to one loss per token.

They return per-token losses. How these are averaged is decided once per batch by `aggregate`, so that
splitting a batch into micro-batches cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
PolicyLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Metrics]]
"""(logprobs_A, old_logprobs_A, advantages_A) -> (loss_A, metrics_A), over the A action tokens."""


def policy_gradient(logprobs_A: Tensor, old_A: Tensor, advantages_A: Tensor) -> tuple[Tensor, Metrics]:
    """The plain one: -A log p. It assumes that the samples came from the policy being updated."""
    return -advantages_A * logprobs_A, {"clip_fraction": torch.zeros_like(logprobs_A)}


def clipped_surrogate(clip_low: float = 0.2, clip_high: float = 0.2) -> PolicyLoss:
    """PPO's: -min(w A, clip(w, 1 - low, 1 + high) A), where w = p / p_old.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347.
    """

    def loss(logprobs_A: Tensor, old_A: Tensor, advantages_A: Tensor) -> tuple[Tensor, Metrics]:
        ratio_A = (logprobs_A - old_A).exp()
        clipped_A = ratio_A.clamp(1 - clip_low, 1 + clip_high)
        free_A, bound_A = ratio_A * advantages_A, clipped_A * advantages_A
        return -torch.minimum(free_A, bound_A), {"clip_fraction": (bound_A < free_A).to(ratio_A.dtype)}

    return loss
