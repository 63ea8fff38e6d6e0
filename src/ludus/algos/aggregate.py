"""How per-token losses become one number: a weight for each token, found once for the whole batch.

| here | verl, `loss_agg_mode` | TRL, `loss_type` |
|---|---|---|
| `token` | token-mean | dapo |
| `sequence` | seq-mean-token-mean | grpo |
| `sequence_sum` | seq-mean-token-sum | (RLOO's trainer) |
| `length` | seq-mean-token-sum-norm | dr_grpo |

Because weights are found before the batch is split into micro-batches, the split cannot change them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ludus.algos.moments import sum_within
from ludus.algos.options import Count

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
    speaking = (length_N > 0).sum().clamp(min=1)
    return weight_T / (length_N[trajectory_T].clamp(min=1) * speaking)


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
    speaking = (sum_within(weight_T, trajectory_T) > 0).sum().clamp(min=1)
    return weight_T / (speaking * length)
