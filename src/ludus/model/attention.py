"""The one attention function that serves sampling, training and plain calls.

It is registered with transformers under the name "ludus". The context that travels down the model's forward as
the keyword argument `ludus_attention` decides what it does:

- a paged context (the engine): keys and values go to the KV cache and are read from it;
- a `PackedContext` (the trainer): tokens attend within their own packed sequence;
- none: ordinary causal attention, so that `model(...)` and `model.generate(...)` still work.

A keyword argument, unlike a thread-local, also reaches the recomputation of activation checkpointing, on
whatever thread the backward pass runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ludus.core.failures import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends."""

    scaling: float
    window: int | None = None
    """Sliding window: a token sees itself and the `window - 1` tokens before it; None sees all."""
    softcap: float | None = None
    """Logit soft cap: softcap * tanh(score / softcap) before the softmax."""
    dropout: float = 0.0


def attend(
    query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, mask: Tensor | None
) -> Tensor:
    """Dense attention: [B, Hq, Q, D] from `query` [B, Hq, Q, D], `key` and `value` [B, Hkv, K, D].

    `mask` is boolean, true where a query may look; without one, query i sees the keys up to i.
    """
    if params.softcap is None:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=params.dropout,
            is_causal=mask is None,
            scale=params.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    if mask is None:
        mask = causal_mask(query.shape[2], key.shape[2], None, query.device)
    return _attend_softcapped(query, key, value, params, params.softcap, mask)


def _attend_softcapped(
    query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, softcap: float, mask: Tensor
) -> Tensor:
    """Written out: SDPA has no soft cap."""
    batch, heads, width, size = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    grouped = query.reshape(batch * kv_heads, -1, size)
    scores = torch.bmm(grouped, key.reshape(batch * kv_heads, length, size).transpose(1, 2))
    scores = torch.tanh(scores.view(batch, heads, width, length) * (params.scaling / softcap)) * softcap
    # Not minus infinity: padding that may look at nothing must give something finite.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=params.dropout, training=params.dropout > 0)
    values = value.reshape(batch * kv_heads, length, -1)
    return torch.bmm(weights.view(batch * kv_heads, -1, length), values).view(batch, heads, width, -1)


def attend_once(
    query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, bias: Tensor
) -> Tensor:
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
        alpha=params.scaling,
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


NAME = "ludus"
CONTEXT = "ludus_attention"

# What models hand down that has no bearing on how tokens attend.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "logits_to_keep",
    }
)


def split_by_length(
    lengths: npt.NDArray[np.int64], padding: float, group_tokens: int
) -> list[tuple[int, int]]:
    """Ranges of descending `lengths` that share a padded group.

    At most the fraction `padding` of a group is padding, and it has at most `group_tokens` tokens.
    """
    ranges: list[tuple[int, int]] = []
    first, used = 0, 0
    for i, length in enumerate(lengths.tolist()):
        width = int(lengths[first])
        area = (i + 1 - first) * width
        if i > first and (area > group_tokens or area - used - length > padding * area):
            ranges.append((first, i))
            first, used = i, 0
        used += length
    ranges.append((first, len(lengths)))
    return ranges


class AttentionContext(Protocol):
    """Decides which tokens attend to which."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """[1, T, Hq, D] from query [1, Hq, T, D], key and value [1, Hkv, T, D]."""


class StackedAttentionContext:
    """Base of contexts that rotate and store stacked states in one kernel, for the fused forward."""

    def attend_qkv(
        self,
        layer: int,
        qkv_TC: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        heads: int,
        kv_heads: int,
        params: AttentionParams,
    ) -> Tensor:
        """[T, Hq D] from queries, keys and values side by side, which are not rotated yet."""
        raise NotImplementedError


def ludus_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    ludus_attention: AttentionContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it."""
    for name, argument in others.items():
        if name not in _HARMLESS and argument is not None and argument is not False:
            raise ConfigError(
                f"{type(module).__name__} asks its attention for {name!r}, which Ludus does not "
                "implement; such a model cannot be trained or sampled here yet"
            )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{type(module).__name__} is not causal; Ludus runs causal models only")
    params = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
    )
    if ludus_attention is not None:
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise ConfigError(f"{type(module).__name__} does not say which layer it is (layer_idx)")
        return ludus_attention.attend(layer, query, key, value, params), None
    return _attend_without_context(
        query, key, value, attention_mask, params, others.get("position_ids")
    ), None


def _attend_without_context(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    params: AttentionParams,
    positions: Tensor | None,
) -> Tensor:
    """Attention without a context, as any implementation of transformers does it."""
    if mask is None:
        _refuse_packed(positions)
        if params.window is not None and params.window < key.shape[2]:
            mask = causal_mask(query.shape[2], key.shape[2], params.window, query.device)
    elif mask.dtype != torch.bool:
        raise ConfigError("a custom attention mask must be boolean (true: may be looked at)")
    return attend(query, key, value, params, mask).transpose(1, 2).contiguous()


class LostContextError(ConfigError):
    """Packed sequences came to the attention without what says where each begins."""


def _refuse_packed(positions: Tensor | None) -> None:
    if positions is not None and positions.shape[-1] > 1 and not bool((positions.diff() == 1).all()):
        raise LostContextError(
            "position_ids that start anew mean packed sequences: pass ludus_attention=PackedContext(...)"
        )


def ludus_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> Tensor | None:
    """None where a context or causal attention needs no mask; transformers' own for padding and caches."""
    if attention_mask is None and q_length == kv_length:
        return None
    arguments["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        **arguments,
    )
    return mask


AttentionInterface.register(NAME, ludus_attention)
AttentionMaskInterface.register(NAME, ludus_mask)
