"""Attention over a padded block: the arithmetic that paged and packed contexts share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Rule:
    """How one layer weighs what it reads."""

    scaling: float
    window: int | None = None
    """A token reads itself and the `window - 1` tokens before it; None reads all."""
    softcap: float | None = None
    """Scores are squeezed into (-softcap, softcap) before the softmax."""
    dropout: float = 0.0


def attend(query: Tensor, key: Tensor, value: Tensor, rule: Rule, mask: Tensor | None) -> Tensor:
    """Weighted values, shaped like `query` [B, Hq, Q, D]; `key` and `value` are [B, Hkv, K, D].

    `mask` is boolean, true where a query may look; without one, query i sees the keys up to i.
    """
    if rule.softcap is None:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=rule.dropout,
            is_causal=mask is None,
            scale=rule.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return _attend_softcapped(query, key, value, rule, rule.softcap, mask)


def _attend_softcapped(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, softcap: float, mask: Tensor | None
) -> Tensor:
    """The explicit softmax: fused kernels know no soft cap."""
    batch, heads, width, size = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    if mask is None:
        mask = causal_mask(width, length, None, query.device)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, width, size)
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(3, 4)) * rule.scaling
    scores = torch.tanh(scores / softcap) * softcap
    # Not minus infinity: padding that may look at nothing must give something finite.
    scores = scores.masked_fill(~mask.unsqueeze(2), torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=rule.dropout, training=rule.dropout > 0)
    return torch.matmul(weights, value.unsqueeze(2)).reshape(batch, heads, width, value.shape[-1])


def causal_mask(width: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[1, 1, width, length]: the last `width` positions of `length`, each looking back."""
    positions = torch.arange(length - width, length, device=device)[None]
    return positional_mask(positions, length, window)


def positional_mask(positions_BQ: Tensor, length: int, window: int | None) -> Tensor:
    """[B, 1, Q, length]: a query at a position sees the keys up to it, within its window."""
    keys = torch.arange(length, device=positions_BQ.device)
    queries = positions_BQ[:, None, :, None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask
