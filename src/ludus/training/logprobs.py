"""Log-probabilities of the trained tokens, in chunks: the logits of a whole batch never exist at once.

Only the places that predict a trained token go through the head. Each chunk's logits are dropped after the
forward pass and computed again for the backward pass, so their peak is one chunk's. A head that is a plain
product goes the short way (`fused_head`); others, and those that an adapter has wrapped, the general one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludus.engine import PackedContext, head_logits, hidden_states, sampling_mode, vocabulary_size
from ludus.engine.model_runner import plain_head
from ludus.kernels import token_logprobs
from ludus.kernels.device import on_device
from ludus.training.fused_head import chunk_rows, linear_logprobs
from ludus.training.packing import Laid, Pack, laid, moved, picked
from ludus.training.passes import Passes
from ludus.training.rows import Row


def action_logprobs(model: nn.Module, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
    """For each trained token: its log-probability, and the entropy of the distribution it came from."""
    return _logprobs(model, pack.lengths, pack.tokens_T, pack.action_A, temperature)


def logprobs_of(
    model: nn.Module, rows: Sequence[Row], scored_T: Tensor, temperature: float, budget: int
) -> Tensor:
    """The log-probability of each scored token under these weights, without gradient; 0 elsewhere.

    Nothing of a row that has no scored token is computed. No row may have its first token scored.
    """
    device = next(model.parameters()).device
    lengths = [len(row.tokens) for row in rows]
    wanted = [i for i, piece in enumerate(torch.split(scored_T, lengths)) if bool(piece.any())]
    found: list[tuple[Tensor, Tensor]] = []

    def score(part: Laid) -> None:
        place_A = picked(scored_T, part.own_T).nonzero().squeeze(1)
        there = part.to(device)
        found_A, _ = _logprobs(model, part.lengths, there.tokens_T, moved(place_A, device), temperature)
        found.append((picked(part.own_T, place_A), found_A))

    with torch.no_grad(), sampling_mode(model), on_device(device):
        Passes(budget).over(laid(rows, wanted, budget), score)
    result_T = np.zeros(len(scored_T), dtype=np.float32)
    for own_A, found_A in found:  # read when all has been asked for, so that the device never waits
        result_T[own_A.numpy()] = found_A.cpu().numpy()
    return torch.from_numpy(result_T)


def _logprobs(
    model: nn.Module, lengths: Sequence[int], tokens_T: Tensor, place_A: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    rows = PackedContext(lengths, tokens_T.device)
    hidden_TD = hidden_states(model, tokens_T, rows.position_ids, rows)
    hidden_AD, tokens_A = hidden_TD.index_select(0, place_A - 1), tokens_T[place_A]
    head = plain_head(model)
    if head is not None and hidden_AD.dtype == head.weight.dtype:
        return linear_logprobs(hidden_AD, head.weight, tokens_A, temperature)
    size = chunk_rows(vocabulary_size(model), tokens_T.device)
    parts = [
        checkpoint(_chunk, model, hidden_cD, tokens_c, temperature, use_reentrant=False)
        for hidden_cD, tokens_c in zip(
            torch.split(hidden_AD, size), torch.split(tokens_A, size), strict=True
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    model: nn.Module, hidden_cD: Tensor, tokens_c: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    return token_logprobs(head_logits(model, hidden_cD), tokens_c, temperature)
