"""Policy losses: pure functions from log-probabilities and advantages to one loss per token.

They return per-token losses. How these are averaged is decided once per batch by `aggregate`, so that
splitting a batch into micro-batches cannot change the gradient. Where a loss looks at a whole sequence
(GSPO), that sequence is one row, and a row is never split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ludus.algos.moments import size_within, sum_within
from ludus.algos.options import NotNegative, Positive, Share

MOST = 20.0
"""Log-ratios are held within ±20: beyond, every bound has long been met, and exp would overflow."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a policy loss reads, for the A tokens that are trained."""

    logprobs_A: Tensor
    """Under the weights being updated, with their gradient."""
    old_A: Tensor
    """Under the weights at the start of the step, by which ratios are measured."""
    advantages_A: Tensor
    sequence_A: Tensor
    """The row each token lies in: whole numbers from 0 within these tokens."""
    behaviour_A: Tensor | None = None
    """As the engine reported them when it sampled. None: `old_A` are these."""


Metrics = dict[str, Tensor]
PolicyLoss = Callable[[Sampled], tuple[Tensor, Metrics]]
"""An algorithm's second half: (loss_A, metrics_A). Its options are keyword arguments: see `load_loss`."""


def policy_gradient(sampled: Sampled) -> tuple[Tensor, Metrics]:
    """The plain one: -A log p. It assumes that the samples came from the policy being updated."""
    loss_A = -sampled.advantages_A * sampled.logprobs_A
    return loss_A, _clip_fractions(torch.zeros_like(loss_A), torch.zeros_like(loss_A))


def clipped_surrogate(
    sampled: Sampled, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2
) -> tuple[Tensor, Metrics]:
    """PPO's: -min(w A, clip(w, 1 - low, 1 + high) A), where w = p / p_old.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347. A high bound above
    the low one leaves room for unlikely tokens to grow: Yu et al., "DAPO", 2025, arXiv:2503.14476 (0.2, 0.28).
    """
    ratio_A = held(sampled.logprobs_A - sampled.old_A).exp()
    return _clipped(ratio_A, sampled.advantages_A, clip_low, clip_high)


def dual_clip(
    sampled: Sampled, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2, bound: Positive = 3.0
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate, bounded below: where A < 0, -max(min(w A, clip(w) A), bound * A).

    Without it, a token that was bad and has become much likelier since (as stale samples have it) pushes
    without limit. Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning",
    2019, arXiv:1912.09729.
    """
    loss_A, metrics = clipped_surrogate(sampled, clip_low=clip_low, clip_high=clip_high)
    most_A = -bound * sampled.advantages_A
    cut_A = (sampled.advantages_A < 0) & (loss_A > most_A)
    high_A = torch.maximum(metrics["clip_fraction_high"], cut_A.to(loss_A.dtype))
    return torch.where(cut_A, most_A, loss_A), _clip_fractions(metrics["clip_fraction_low"], high_A)


def gspo(
    sampled: Sampled, *, clip_low: Share = 3e-4, clip_high: NotNegative = 4e-4
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate with one ratio for a whole sequence: the geometric mean of its tokens' ratios.

        s = exp(mean_t(log p_t - log p_old,t)),   s_t = sg(s) * p_t / sg(p_t)

    s_t has the value of s, so a sequence is clipped as a whole, and lets every token keep its own advantage
    (GSPO-token). Where all tokens of a sequence share their advantage, as in groups, its gradient is that of
    s itself. Zheng et al., "Group Sequence Policy Optimization", 2025, arXiv:2507.18071.
    """
    own_A = sampled.logprobs_A.detach()
    sequence_A = sampled.sequence_A
    difference_A = own_A - sampled.old_A
    mean_A = sum_within(difference_A, sequence_A)[sequence_A]
    mean_A = mean_A / size_within(sequence_A, difference_A.dtype)
    ratio_A = held(mean_A).exp() * (sampled.logprobs_A - own_A).exp()
    return _clipped(ratio_A, sampled.advantages_A, clip_low, clip_high)


def cispo(
    sampled: Sampled, *, clip_low: Share = 1.0, clip_high: NotNegative = 4.0
) -> tuple[Tensor, Metrics]:
    """The policy gradient, weighted by a bounded ratio: -sg(clip(w, 1 - low, 1 + high)) A log p.

    What is clipped is the weight, not the update: every token keeps a gradient, the rare and decisive ones
    included. By default there is no lower bound, and the upper one is 5. MiniMax, "MiniMax-M1: Scaling
    Test-Time Compute Efficiently with Lightning Attention", 2025, arXiv:2506.13585.
    """
    ratio_A = held(sampled.logprobs_A.detach() - sampled.old_A).exp()
    weight_A = ratio_A.clamp(1 - clip_low, 1 + clip_high)
    loss_A = -weight_A * sampled.advantages_A * sampled.logprobs_A
    return loss_A, _clip_fractions(ratio_A < weight_A, ratio_A > weight_A)


def held(difference_A: Tensor) -> Tensor:
    """A log-ratio whose exponential cannot overflow."""
    return difference_A.clamp(-MOST, MOST)


def _clipped(
    ratio_A: Tensor, advantages_A: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    clipped_A = ratio_A.clamp(1 - clip_low, 1 + clip_high)
    free_A, bound_A = ratio_A * advantages_A, clipped_A * advantages_A
    is_clipped_A = bound_A < free_A
    fractions = _clip_fractions(is_clipped_A & (advantages_A < 0), is_clipped_A & (advantages_A > 0))
    return -torch.minimum(free_A, bound_A), fractions


def _clip_fractions(low_A: Tensor, high_A: Tensor) -> Metrics:
    """Where a ratio was held at its lower and at its upper bound; no token is at both."""
    low_A, high_A = low_A.float(), high_A.float()
    return {
        "clip_fraction": low_A + high_A,
        "clip_fraction_low": low_A,
        "clip_fraction_high": high_A,
    }
