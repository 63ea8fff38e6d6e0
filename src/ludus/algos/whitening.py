"""Normalisation over all trained tokens of a batch, task set by task set."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algos.credit import Credit
from ludus.algos.moments import centred, standardised, sum_within

TINY = 1e-8
"""Added to the deviation of a batch, which is hardly ever small."""
NOISE = 1e-6
"""Differences up to this are rounding, such as the divergence of a policy from itself."""


def whitened(values_T: Tensor, credit: Credit) -> Tensor:
    """(x - mean) / (deviation + 1e-8) over the tokens that the loss applies to; 0 elsewhere.

    Every token counts once, so long episodes count more. Sets are kept apart, because one with larger or more
    scattered rewards would otherwise decide the scale for all. A set whose values differ by rounding alone has
    no signal, and gets 0: blown up to unit size, its noise would be an update like any other.
    """
    chosen = credit.loss_mask.nonzero().squeeze(1)
    values_A, set_A = values_T[chosen], credit.sets[credit.trajectory_T[chosen]]
    differs_A = (centred(values_A, set_A).abs() > NOISE).to(values_A.dtype)
    has_signal_A = sum_within(differs_A, set_A)[set_A] > 0
    whitened_A = standardised(values_A, set_A, TINY) * has_signal_A
    return torch.zeros_like(values_T).index_copy(0, chosen, whitened_A)
