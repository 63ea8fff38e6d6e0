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
    if mask is None:
        mask = causal_mask(query.shape[2], key.shape[2], None, query.device)
    return _attend_softcapped(query, key, value, rule, rule.softcap, mask)


def _attend_softcapped(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, softcap: float, mask: Tensor
) -> Tensor:
    """Written out: fused kernels know no soft cap."""
    batch, heads, width, size = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    grouped = query.reshape(batch * kv_heads, -1, size)
    scores = torch.bmm(grouped, key.reshape(batch * kv_heads, length, size).transpose(1, 2))
    scores = torch.tanh(scores.view(batch, heads, width, length) * (rule.scaling / softcap)) * softcap
    # Not minus infinity: padding that may look at nothing must give something finite.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=rule.dropout, training=rule.dropout > 0)
    values = value.reshape(batch * kv_heads, length, -1)
    return torch.bmm(weights.view(batch * kv_heads, -1, length), values).view(batch, heads, width, -1)


def attend_once(query: Tensor, key: Tensor, value: Tensor, rule: Rule, bias: Tensor) -> Tensor:
    """`attend` for one query in each row and no soft cap: two batched products that serve all query
    heads of a key head at once, which is faster than the fused kernel on a CPU.

    `bias` [B, 1, K] is added to the scores: nothing, or so little that it is never looked at.
    """
    batch, heads, _, size = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    scores = torch.baddbmm(
        bias[:, None].expand(batch, kv_heads, 1, length).reshape(-1, 1, length),
        query.reshape(batch * kv_heads, -1, size),
        key.reshape(batch * kv_heads, length, size).transpose(1, 2),
        alpha=rule.scaling,
    )
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, value.reshape(batch * kv_heads, length, -1)).view(batch, heads, 1, -1)


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
