"""How far a policy is from its reference, estimated from the sampled tokens alone.

The estimator is k3, unbiased and never negative: exp(d) - d - 1 with d = log q - log p, for tokens drawn
from p. Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from torch import Tensor


def k3(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """An estimate of KL(p || q) for each token."""
    difference_A = reference_A - logprobs_A
    return difference_A.exp() - difference_A - 1
