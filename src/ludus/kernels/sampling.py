"""Tokens drawn from rows of logits, with their log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.kernels.support import unavailable


def sample(logits_RV: Tensor, temperatures_R: Tensor, shares_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, log-probabilities, soundness) of R rows.

    A row's share (float64, in [0, 1)) is inverted through its cumulated distribution at its temperature; at
    temperature 0 the likeliest token is taken and its log-probability is that at temperature 1. A row whose
    logits hold a NaN or no finite maximum is not sound, and its token means nothing.
    """
    if unavailable(logits_RV.device) is None:
        from ludus.kernels.compiled import sampling

        return sampling.sample(logits_RV, temperatures_R, shares_R)
    logits_RV = logits_RV.float()
    is_greedy_R = temperatures_R == 0
    divisor_R1 = torch.where(is_greedy_R, torch.ones_like(temperatures_R), temperatures_R)[:, None]
    scaled_RV = (logits_RV - logits_RV.amax(1, keepdim=True)) / divisor_R1
    logprobs_RV = scaled_RV.log_softmax(1)
    reached_RV = logprobs_RV.exp().double().cumsum(1)
    marks_R1 = shares_R.double()[:, None] * reached_RV[:, -1:]
    drawn_R = torch.searchsorted(reached_RV, marks_R1, right=True)[:, 0]
    tokens_R = torch.where(is_greedy_R, logits_RV.argmax(1), drawn_R).clamp(max=logits_RV.shape[1] - 1)
    values_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    return tokens_R, values_R, torch.isfinite(values_R)
