"""Log-probabilities of the trained tokens, in chunks: the logits of a whole batch never exist at once.

Only the places that predict a trained token go through the head. Each chunk's logits are dropped after the
forward pass and computed again for the backward pass, so their peak is one chunk's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludus.engine import PackedContext, head_logits, hidden_states, sampling_mode
from ludus.training.packing import Pack, laid
from ludus.training.rows import Row

CHUNK = 4096
"""Trained tokens whose logits exist at once."""


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
    result_T = torch.zeros(len(scored_T))
    lengths = [len(row.tokens) for row in rows]
    wanted = [i for i, piece in enumerate(torch.split(scored_T, lengths)) if bool(piece.any())]
    with torch.no_grad(), sampling_mode(model):
        for part in laid(rows, wanted, budget):
            mask_T = scored_T[part.own_T]
            place_A = mask_T.nonzero().squeeze(1).to(device)
            found_A, _ = _logprobs(model, part.lengths, part.tokens_T.to(device), place_A, temperature)
            result_T[part.own_T[mask_T]] = found_A.cpu()
    return result_T


def _logprobs(
    model: nn.Module, lengths: Sequence[int], tokens_T: Tensor, place_A: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    rows = PackedContext(lengths, tokens_T.device)
    hidden_TD = hidden_states(model, tokens_T, rows.position_ids, rows)
    parts = [
        checkpoint(_chunk, model, hidden_cD, tokens_c, temperature, use_reentrant=False)
        for hidden_cD, tokens_c in zip(
            torch.split(hidden_TD[place_A - 1], CHUNK),
            torch.split(tokens_T[place_A], CHUNK),
            strict=True,
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    model: nn.Module, hidden_cD: Tensor, tokens_c: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logprobs_cV = torch.log_softmax(head_logits(model, hidden_cD).float() / temperature, dim=-1)
    entropy_c = -(logprobs_cV.exp() * logprobs_cV).sum(-1)
    return logprobs_cV.gather(1, tokens_c[:, None]).squeeze(1), entropy_c
