"""What is added to a policy loss: a bonus for staying undecided, a price for leaving the reference."""

from __future__ import annotations

from torch import Tensor


def regularised(
    loss_A: Tensor,
    *,
    entropy_A: Tensor | None = None,
    entropy_weight: float = 0.0,
    kl_A: Tensor | None = None,
    kl_weight: float = 0.0,
) -> Tensor:
    """loss - entropy_weight * H + kl_weight * KL, token by token."""
    if entropy_A is not None and entropy_weight:
        loss_A = loss_A - entropy_weight * entropy_A
    if kl_A is not None and kl_weight:
        loss_A = loss_A + kl_weight * kl_A
    return loss_A
