"""GRPO: an attempt is worth how much better it was than its siblings.

    A_i = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + eps)

The standard deviation is the unbiased one (divided by G - 1), as in the paper's code. A group of one, or
one whose rewards are all equal, carries no signal: its advantages are 0.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024,
arXiv:2402.03300.
"""

from __future__ import annotations

from torch import Tensor

from ludus.algos.credit import Credit, group_mean

EPSILON = 1e-6


def grpo(credit: Credit) -> Tensor:
    """Group-normalised rewards, one per action token."""
    mean_N, size_N = group_mean(credit.rewards_N, credit.group_N)
    centred_N = credit.rewards_N - mean_N
    squares_N, _ = group_mean(centred_N**2, credit.group_N)
    std_N = (squares_N * size_N / (size_N - 1).clamp(min=1)).sqrt()
    return credit.spread(centred_N / (std_N + EPSILON))
