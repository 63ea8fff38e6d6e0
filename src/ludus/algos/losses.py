"""Policy losses, importance corrections and KL penalties: pure functions with one number per token.

How losses are averaged is decided once per batch by an aggregation, so that splitting a batch into
micro-batches cannot change the gradient. Where a loss looks at a whole sequence (GSPO), that sequence is one
row, and a row is never split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ludus.algos.advantage_inputs import Count, NotNegative, Positive, Share, size_within, sum_within

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20: beyond, every clip range is exceeded anyway, and exp would overflow."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a policy loss, for the A tokens that are trained."""

    logprobs_A: Tensor
    """Under the weights being updated, with their gradient."""
    old_logprobs_A: Tensor
    """Under the policy that importance ratios are measured by: the engine's own numbers when it sampled; where
    `rl.correction` compares the two, the trainer's at the start of the step; or, if that step is one update,
    `logprobs_A` of this very pass, detached (`RLConfig.starts_at_training_pass`)."""
    advantages_A: Tensor
    row_A: Tensor
    """The row each token lies in: whole numbers from 0 within these tokens."""
    rollout_logprobs_A: Tensor | None = None
    """As the engine reported them when it sampled. None: `old_logprobs_A` are these."""


Metrics = dict[str, Tensor]
PolicyLoss = Callable[[LossInputs], tuple[Tensor, Metrics]]
"""An algorithm's second half: (loss_A, metrics_A). Its options are keyword arguments: see `load_loss`."""


def policy_gradient(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The plain one: -A log p. It assumes that the samples came from the policy being updated."""
    loss_A = -inputs.advantages_A * inputs.logprobs_A
    return loss_A, _clip_fractions(torch.zeros_like(loss_A), torch.zeros_like(loss_A))


def clipped_surrogate(
    inputs: LossInputs, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2
) -> tuple[Tensor, Metrics]:
    """PPO's: -min(w A, clip(w, 1 - low, 1 + high) A), where w = p / p_old is the importance ratio.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347. A high bound above
    the low one leaves room for unlikely tokens to grow: Yu et al., "DAPO", 2025, arXiv:2503.14476 (0.2, 0.28).
    """
    ratio_A = clamped_log_ratio(inputs.logprobs_A - inputs.old_logprobs_A).exp()
    return _clipped(ratio_A, inputs.advantages_A, clip_low, clip_high)


def dual_clip(
    inputs: LossInputs, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2, bound: Positive = 3.0
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate, bounded below: where A < 0, -max(min(w A, clip(w) A), bound * A).

    Without it, a token that was bad and has become much likelier since (as stale samples have it) pushes
    without limit. Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning",
    2019, arXiv:1912.09729.
    """
    loss_A, metrics = clipped_surrogate(inputs, clip_low=clip_low, clip_high=clip_high)
    most_A = -bound * inputs.advantages_A
    cut_A = (inputs.advantages_A < 0) & (loss_A > most_A)
    high_A = torch.maximum(metrics["clip_fraction_high"], cut_A.to(loss_A.dtype))
    return torch.where(cut_A, most_A, loss_A), _clip_fractions(metrics["clip_fraction_low"], high_A)


def gspo(
    inputs: LossInputs, *, clip_low: Share = 3e-4, clip_high: NotNegative = 4e-4
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate with one ratio for a whole sequence: the geometric mean of its tokens' ratios.

        s = exp(mean_t(log p_t - log p_old,t)),   s_t = sg(s) * p_t / sg(p_t)

    s_t has the value of s, so a sequence is clipped as a whole, and lets every token keep its own advantage
    (GSPO-token). Where all tokens of a sequence share their advantage, as in groups, its gradient is that of
    s itself. Zheng et al., "Group Sequence Policy Optimization", 2025, arXiv:2507.18071.
    """
    own_A = inputs.logprobs_A.detach()
    row_A = inputs.row_A
    difference_A = own_A - inputs.old_logprobs_A
    mean_A = sum_within(difference_A, row_A)[row_A]
    mean_A = mean_A / size_within(row_A, difference_A.dtype)
    ratio_A = clamped_log_ratio(mean_A).exp() * (inputs.logprobs_A - own_A).exp()
    return _clipped(ratio_A, inputs.advantages_A, clip_low, clip_high)


def cispo(
    inputs: LossInputs, *, clip_low: Share = 1.0, clip_high: NotNegative = 4.0
) -> tuple[Tensor, Metrics]:
    """The policy gradient, weighted by a bounded ratio: -sg(clip(w, 1 - low, 1 + high)) A log p.

    What is clipped is the weight, not the update: every token keeps a gradient, the rare and decisive ones
    included. By default there is no lower bound, and the upper one is 5. MiniMax, "MiniMax-M1: Scaling
    Test-Time Compute Efficiently with Lightning Attention", 2025, arXiv:2506.13585.
    """
    ratio_A = clamped_log_ratio(inputs.logprobs_A.detach() - inputs.old_logprobs_A).exp()
    weight_A = ratio_A.clamp(1 - clip_low, 1 + clip_high)
    loss_A = -weight_A * inputs.advantages_A * inputs.logprobs_A
    return loss_A, _clip_fractions(ratio_A < weight_A, ratio_A > weight_A)


def clamped_log_ratio(difference_A: Tensor) -> Tensor:
    """A log-ratio whose exponential cannot overflow."""
    return difference_A.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(
    ratio_A: Tensor, advantages_A: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    clipped_A = ratio_A.clamp(1 - clip_low, 1 + clip_high)
    free_A, bound_A = ratio_A * advantages_A, clipped_A * advantages_A
    is_clipped_A = bound_A < free_A
    fractions = _clip_fractions(is_clipped_A & (advantages_A < 0), is_clipped_A & (advantages_A > 0))
    return -torch.minimum(free_A, bound_A), fractions


def _clip_fractions(low_A: Tensor, high_A: Tensor) -> Metrics:
    """Where a ratio was clamped at its lower and at its upper bound; no token is at both."""
    low_A, high_A = low_A.float(), high_A.float()
    return {
        "clip_fraction": low_A + high_A,
        "clip_fraction_low": low_A,
        "clip_fraction_high": high_A,
    }


# Loss aggregation
#
# How per-token losses become one number: a weight for each token, found once for the whole batch.
#
# | here | verl, `loss_agg_mode` | TRL, `loss_type` |
# |---|---|---|
# | `token` | token-mean | dapo |
# | `sequence` | seq-mean-token-mean | grpo |
# | `sequence_sum` | seq-mean-token-sum | (RLOO's trainer) |
# | `length` | seq-mean-token-sum-norm | dr_grpo |
#
# Because weights are found before the batch is split into micro-batches, the split cannot change them.

Aggregation = Callable[[Tensor, Tensor], Tensor]
"""(trajectory_T, trained_T) -> weight_T; 0 where the loss does not apply."""


def by_token(trajectory_T: Tensor, trained_T: Tensor) -> Tensor:
    """Every token weighs the same, long episodes more (DAPO, arXiv:2503.14476). The sum is 1."""
    weight_T = trained_T.to(torch.float32)
    return weight_T / weight_T.sum().clamp(min=1)


def by_sequence(trajectory_T: Tensor, trained_T: Tensor) -> Tensor:
    """Every episode weighs the same; its tokens share its weight (GRPO as published). The sum is 1."""
    weight_T = trained_T.to(torch.float32)
    length_N = sum_within(weight_T, trajectory_T)
    count = (length_N > 0).sum().clamp(min=1)
    return weight_T / (length_N[trajectory_T].clamp(min=1) * count)


def by_sequence_sum(trajectory_T: Tensor, trained_T: Tensor) -> Tensor:
    """Sum over each episode's tokens, mean over episodes: -A log p(episode), as REINFORCE and RLOO have it.

    The sum is the mean length, so gradients are that much longer than with `by_sequence`.
    """
    return by_length(trajectory_T, trained_T, length=1)


def by_length(trajectory_T: Tensor, trained_T: Tensor, *, length: Count) -> Tensor:
    """Every token weighs 1 / (episodes * length) for a constant length, such as the budget of tokens.

    Neither an episode's length nor the others' changes what a token weighs (Dr. GRPO, arXiv:2503.20783). The
    sum is the mean length divided by the constant.
    """
    weight_T = trained_T.to(torch.float32)
    count = (sum_within(weight_T, trajectory_T) > 0).sum().clamp(min=1)
    return weight_T / (count * length)


def with_regularization(
    loss_A: Tensor,
    *,
    entropy_A: Tensor | None = None,
    entropy_weight: float = 0.0,
    kl_A: Tensor | None = None,
    kl_weight: float = 0.0,
) -> Tensor:
    """loss - entropy_weight * H + kl_weight * KL per token: an entropy bonus and a KL penalty."""
    if entropy_A is not None and entropy_weight:
        loss_A = loss_A - entropy_weight * entropy_A
    if kl_A is not None and kl_weight:
        loss_A = loss_A + kl_weight * kl_A
    return loss_A


# Importance sampling correction (TIS, IcePop). The engine that sampled may hold other weights (stale samples)
# or compute in another way. Then p_old, which the trainer computes, is not the probability that the sample
# had, and the loss of each token is weighted by
#
#     w = p_old / p_behaviour
#
# whose product over long sequences explodes. Truncation caps it, which bounds the variance at the price of
# some bias; masking drops tokens whose ratio lies outside of a band. Level "sequence" uses one ratio for all
# tokens of a row: the product of theirs. Weights carry no gradient.
#
# Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025 (truncated); Ling
# Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model", 2025,
# arXiv:2510.18855 (masked).

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


# KL divergence between a policy p and its reference q, from tokens drawn from p, with d = log q - log p:
#
#     k1 = -d                 unbiased, scattered, may be negative
#     k2 = d^2 / 2            biased, never negative
#     k3 = exp(d) - d - 1     unbiased, never negative
#
# As a number, k3 is the best of them, and as a reward (`kl_reward`), where no gradient passes through it, k1
# is what the divergence asks for. As a term of the loss it is the gradient that counts, and in expectation
# over the samples: k1's is 0, so it penalises nothing; k2's is that of KL(p || q), exactly; k3's is that of
# KL(q || p). Schulman, "Approximating KL divergence", 2020; Tang and Munos, "On a few pitfalls in KL
# divergence gradient estimation for RL", 2025, arXiv:2506.09477.

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(logprobs_A, reference_A) -> estimate_A."""


def k1(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """log p - log q."""
    return logprobs_A - reference_A


def k2(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """Half the squared difference."""
    return (logprobs_A - reference_A) ** 2 / 2


def k3(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """exp(d) - d - 1."""
    # clamped from above only: far below, where the policy has moved away, the gradient must not vanish
    difference_A = (reference_A - logprobs_A).clamp(max=MAX_LOG_RATIO)
    return difference_A.exp() - difference_A - 1


def kl_reward(
    logprobs_A: Tensor,
    reference_A: Tensor,
    action_T: Tensor,
    *,
    beta: float,
    divergence: Divergence = k1,
) -> Tensor:
    """-beta times the divergence as a reward for each action token: `AdvantageInputs.penalty_T`."""
    penalty_A = -beta * divergence(logprobs_A.detach(), reference_A.detach())
    return penalty_A.new_zeros(len(action_T)).masked_scatter(action_T, penalty_A)


def adapted_kl_coefficient(
    coefficient: float, kl: float, episodes: int, *, target: float, horizon: int
) -> float:
    """The KL coefficient of the next step, so that the divergence comes to a target.

        e = clip(KL / target - 1, -0.2, 0.2),   beta <- beta * (1 + e * min(1, episodes / horizon))

    So a step changes it by a fifth at most, and it stays positive: without the bound, a step of more than five
    horizons would make it negative, which rewards divergence.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, arXiv:1909.08593; as verl's
    AdaptiveKLController has it, KL is the mean over tokens.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * min(1.0, episodes / horizon))
