"""KL penalty: estimators of the KL divergence between a policy p and its reference q, from sampled tokens.

With d = log q - log p, for tokens drawn from p::

    k1 = -d                 unbiased, scattered, may be negative
    k2 = d^2 / 2            biased, never negative
    k3 = exp(d) - d - 1     unbiased, never negative

As a number, k3 is the best of them, and as a reward (`kl_reward`), where no gradient passes through it, k1 is
what the divergence asks for. As a term of the loss it is the gradient that counts, and in expectation over
the samples: k1's is 0, so it penalises nothing; k2's is that of KL(p || q), exactly; k3's is that of
KL(q || p). Schulman, "Approximating KL divergence", 2020; Tang and Munos, "On a few pitfalls in KL
divergence gradient estimation for RL", 2025, arXiv:2506.09477.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ludus.algos.losses import MAX_LOG_RATIO

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
