"""Normalisation over all trained tokens of a batch, task set by task set."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algos.credit import Credit
from ludus.algos.moments import standardised

TINY = 1e-8
"""Added to the deviation of a batch, which is hardly ever small."""


def whitened(values_T: Tensor, credit: Credit) -> Tensor:
    """(x - mean) / (deviation + 1e-8) over the tokens that the loss applies to; 0 elsewhere.

    Every token counts once, so long episodes count more. Sets are kept apart, because one with larger or more
    scattered rewards would otherwise decide the scale for all.
    """
    chosen = credit.loss_mask.nonzero().squeeze(1)
    set_A = credit.sets[credit.trajectory_T[chosen]]
    return torch.zeros_like(values_T).index_copy(0, chosen, standardised(values_T[chosen], set_A, TINY))
