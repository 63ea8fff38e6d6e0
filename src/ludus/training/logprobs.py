"""Log-probabilities of the action tokens, in chunks: the logits of a whole batch never exist at once.

Only the places that predict an action go through the head. Each chunk's logits are dropped after the
forward pass and computed again for the backward pass, so their peak is one chunk's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludus.engine import PackedContext, head_logits, hidden_states
from ludus.training.packing import Pack

CHUNK = 4096
"""Action tokens whose logits exist at once."""


def action_logprobs(model: nn.Module, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
    """For each action token: its log-probability, and the entropy of the distribution it came from."""
    rows = PackedContext(pack.lengths, pack.tokens_T.device)
    hidden_TD = hidden_states(model, pack.tokens_T, rows.position_ids, rows)
    hidden_AD = hidden_TD[pack.action_A - 1]
    parts = [
        checkpoint(_chunk, model, hidden_cD, tokens_c, temperature, use_reentrant=False)
        for hidden_cD, tokens_c in zip(
            torch.split(hidden_AD, CHUNK), torch.split(pack.actions, CHUNK), strict=True
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
