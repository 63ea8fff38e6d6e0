"""How per-token losses become one number: a weight for each token, summing to 1 over the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Aggregation = Callable[[Tensor, Tensor], Tensor]
"""(trajectory_T, action_T) -> weight_T; 0 where the token is not an action."""


def by_token(trajectory_T: Tensor, action_T: Tensor) -> Tensor:
    """Every action token weighs the same; long episodes weigh more (DAPO, arXiv:2503.14476)."""
    weight_T = action_T.to(torch.float32)
    return weight_T / weight_T.sum().clamp(min=1)


def by_sequence(trajectory_T: Tensor, action_T: Tensor) -> Tensor:
    """Every episode weighs the same; its tokens share its weight (GRPO as published)."""
    weight_T = action_T.to(torch.float32)
    count = int(trajectory_T.max()) + 1 if trajectory_T.numel() else 0
    length_N = torch.zeros(count, device=weight_T.device).index_add(0, trajectory_T, weight_T)
    speaking = (length_N > 0).sum().clamp(min=1)
    return weight_T / (length_N[trajectory_T].clamp(min=1) * speaking)
