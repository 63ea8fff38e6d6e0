"""From logits to tokens: one uniform number per token, inverted through the distribution.

The number is a function of the request's seed and the token's position, so a request draws the same
tokens whatever it is batched with. Reported log-probabilities are those of the full distribution at the
request's temperature; top-k, top-p, min-p and the repetition penalty change only what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.core.generation import Sampling
from ludus.core.random import uniforms

# Below 1 by more than the rounding of a product with the total, so that the last token that can be
# drawn is one with a probability.
_LARGEST = 1 - 2.0**-40


def sample_with_params(
    logits_RV: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    seen: Sequence[npt.NDArray[np.bool_] | None],
) -> tuple[list[int], list[float], list[bool]]:
    """Tokens, their log-probabilities, and whether each row was finite (no NaN), for R rows.

    `positions` count the tokens each request has generated; `seen` marks the tokens of its context
    for the rows that ask for a repetition penalty.
    """
    logits_RV = logits_RV.float()
    temperatures = [s.temperature or 1.0 for s in samplings]
    logprobs_RV = log_softmax_at(logits_RV, temperatures)
    special = [i for i, s in enumerate(samplings) if s.temperature == 0 or s.is_truncated]
    if len(special) == len(samplings):
        tokens_R = _draw_special(logits_RV, samplings, positions, seen)
    else:
        tokens_R = _draw(torch.exp(logprobs_RV), samplings, positions)
        if special:
            tokens_R[special] = _draw_special(
                logits_RV[special],
                [samplings[i] for i in special],
                [positions[i] for i in special],
                [seen[i] for i in special],
            )
    values_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    return tokens_R.tolist(), values_R.tolist(), torch.isfinite(values_R).tolist()


def log_softmax_at(logits_RV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """log softmax(logits / T) row by row; safe for tiny temperatures."""
    if any(t != 1 for t in temperatures):
        divisor = torch.tensor(temperatures, dtype=torch.float32, device=logits_RV.device)[:, None]
        logits_RV = (logits_RV - logits_RV.amax(1, keepdim=True)) / divisor
    return torch.log_softmax(logits_RV, dim=1)


def seed_of(sampling: Sampling) -> np.uint64:
    """A request's seed as the random numbers take it."""
    return np.uint64(sampling.seed & 0xFFFFFFFFFFFFFFFF)


def uniforms_at(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The uniform number of each draw: a function of its seed and position alone."""
    return np.minimum(uniforms(seeds, positions), _LARGEST)


def _draw(weights_RV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """The token at which the cumulated weights pass each row's uniform number times their total."""
    uniform = uniforms_at(np.array([seed_of(s) for s in samplings]), positions)
    cumulated_RV = weights_RV.double().cumsum(1)
    targets = torch.from_numpy(uniform).to(weights_RV.device)[:, None] * cumulated_RV[:, -1:]
    found = torch.searchsorted(cumulated_RV, targets, right=True)[:, 0]
    return found.clamp_(max=weights_RV.shape[1] - 1)


def _draw_special(
    logits_RV: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    seen: Sequence[npt.NDArray[np.bool_] | None],
) -> Tensor:
    """Rows that are greedy, truncated or penalised."""
    if any(mark is not None for mark in seen):
        logits_RV = _penalised(logits_RV, samplings, seen)
    tokens_R = logits_RV.argmax(1)
    drawn = [i for i, s in enumerate(samplings) if s.temperature > 0]
    if drawn:
        chosen = [samplings[i] for i in drawn]
        weights = _truncated(logits_RV[drawn], chosen)
        tokens_R[drawn] = _draw(weights, chosen, [positions[i] for i in drawn])
    return tokens_R


def _penalised(
    logits_RV: Tensor, samplings: Sequence[Sampling], seen: Sequence[npt.NDArray[np.bool_] | None]
) -> Tensor:
    """Tokens of the context made less likely: positive logits divided, negative ones multiplied."""
    nothing = np.zeros(logits_RV.shape[1], dtype=np.bool_)
    marks = np.stack([nothing if mark is None else mark for mark in seen])
    seen_RV = torch.from_numpy(marks).to(logits_RV.device)
    penalties = torch.tensor([s.repetition_penalty for s in samplings], device=logits_RV.device)[:, None]
    penalised = torch.where(logits_RV > 0, logits_RV / penalties, logits_RV * penalties)
    return torch.where(seen_RV, penalised, logits_RV)


def _truncated(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Probabilities at temperature, zero outside top-k, then top-p of what is left, then min-p."""
    device = logits_RV.device
    probabilities = torch.exp(log_softmax_at(logits_RV, [s.temperature for s in samplings]))
    ordered, order = probabilities.sort(dim=1, descending=True, stable=True)
    size = logits_RV.shape[1]
    top_k = torch.tensor([s.top_k or size for s in samplings], device=device)[:, None]
    ordered = ordered * (torch.arange(size, device=device) < top_k)
    cumulated = ordered.double().cumsum(1)
    before = cumulated - ordered
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)[:, None]
    keep = (before < top_p * cumulated[:, -1:]) | (top_p >= 1)
    min_p = torch.tensor([s.min_p for s in samplings], device=device)[:, None]
    keep &= ordered >= min_p * ordered[:, :1]
    return torch.zeros_like(probabilities).scatter_(1, order, ordered * keep)
