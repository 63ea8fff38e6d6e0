"""Dense attention, its masks, and what decides which tokens attend to which.

The context that travels down the model's forward (`forward.py`) is a paged one for the engine, whose keys and
values are in the KV cache, or a `PackedContext` for the trainer, whose tokens attend within their own sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends."""

    scaling: float
    window: int | None = None
    """Sliding window: a token sees itself and the `window - 1` tokens before it; None sees all."""
    softcap: float | None = None
    """Logit soft cap: softcap * tanh(score / softcap) before the softmax."""
    dropout: float = 0.0
    chunk: int | None = None
    """Chunked attention: a token sees the tokens up to itself of its own chunk of this many positions."""
    sinks: Tensor | None = field(default=None, compare=False)
    """[Hq] A score of each head that takes part in the softmax and has no value (attention sinks)."""

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Which keys a query sees; what masks are kept by."""
        return self.window, self.chunk

    def is_cut(self, length: int) -> bool:
        """Whether some of `length` tokens do not see all that come before them."""
        return any(limit is not None and limit < length for limit in self.reach)


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How far tokens see: not only up to themselves, where the tokens of an image see each other."""

    last_T: npt.NDArray[np.int64]
    """The place of the last token that each one sees."""
    windows_only: bool
    """Whether that holds in layers with a sliding window alone, and the others are causal (Gemma 4)."""

    def holds(self, params: AttentionParams) -> bool:
        """Whether it holds in a layer that attends like this."""
        return params.window is not None or not self.windows_only


def attend(
    query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, mask: Tensor | None
) -> Tensor:
    """Dense attention: [B, Hq, Q, D] from `query` [B, Hq, Q, D], `key` and `value` [B, Hkv, K, D].

    `mask` is boolean, true where a query may look; without one, query i sees the keys up to i.
    """
    if params.softcap is not None:
        if mask is None:
            mask = causal_mask(query.shape[2], key.shape[2], params, query.device)
        return _attend_softcapped(query, key, value, params, params.softcap, mask)
    if params.sinks is not None:
        query, key, value, mask = _with_sinks(query, key, value, params.sinks / params.scaling, mask)
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=params.dropout,
        is_causal=mask is None,
        scale=params.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output if params.sinks is None else output[:, :, 1:]


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sinks as the score of a first key whose value is 0, so that any kernel computes them.

    That key meets one more dimension of the queries, where the other keys are 0. A query of which no result is
    read comes first too: the causal mask stays a diagonal. Kernels want head sizes that are multiples of 8.
    """
    more = 8 - query.shape[3] % 8
    sinks = sinks_H.to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = functional.pad(torch.cat([query, sinks], dim=3), (0, more - 1, 1, 0))
    sink_key = functional.one_hot(torch.tensor(key.shape[3], device=key.device), key.shape[3] + more)
    first = sink_key.to(key.dtype).expand(*key.shape[:2], 1, -1)
    key = torch.cat([first, functional.pad(key, (0, more))], dim=2)
    value = functional.pad(value, (0, 0, 1, 0))
    return query, key, value, None if mask is None else functional.pad(mask, (1, 0, 1, 0), value=True)


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
    if params.sinks is not None:
        sinks = params.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(batch, -1, width, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :length].to(query.dtype)
    weights = functional.dropout(weights, p=params.dropout, training=params.dropout > 0)
    values = value.reshape(batch * kv_heads, length, -1)
    return torch.bmm(weights.reshape(batch * kv_heads, -1, length), values).view(batch, heads, width, -1)


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
    if params.sinks is not None:
        sinks = params.sinks.to(scores.dtype).view(1, kv_heads, -1, 1).expand(batch, -1, -1, 1)
        scores = torch.cat([scores, sinks.flatten(0, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :length].to(query.dtype)
    return torch.bmm(weights, value.reshape(batch * kv_heads, length, -1)).view(batch, heads, 1, -1)


def causal_mask(width: int, length: int, params: AttentionParams, device: torch.device) -> Tensor:
    """[1, 1, width, length]: the last `width` positions of `length`, each looking back."""
    positions = torch.arange(length - width, length, device=device)[None]
    return positional_mask(positions, length, params)


def positional_mask(
    positions_BQ: Tensor, length: int, params: AttentionParams, last_BQ: Tensor | None = None
) -> Tensor:
    """[B, 1, Q, length]: a query at a position sees the keys up to it, within its window or chunk.

    With `last_BQ` it sees the keys up to there.
    """
    keys = torch.arange(length, device=positions_BQ.device)
    queries = positions_BQ[:, None, :, None]
    mask = keys <= (queries if last_BQ is None else last_BQ[:, None, :, None])
    if params.window is not None:
        mask &= keys > queries - params.window
    if params.chunk is not None:
        mask &= keys >= queries - queries % params.chunk
    return mask


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


_Running = tuple[AttentionContext, Tensor] | None
_running: ContextVar[_Running] = ContextVar("ludus_attention", default=None)


def current_context() -> AttentionContext | None:
    """The context of the forward pass that this thread runs."""
    by = _running.get()
    return by and by[0]


def current_positions() -> Tensor | None:
    """[T] Where the tokens of the forward pass that this thread runs stand in their sequences."""
    by = _running.get()
    return by and by[1]


@contextmanager
def running(context: AttentionContext | None, positions_T: Tensor | None) -> Iterator[None]:
    """Run a forward pass with a context, for modules that get no keyword arguments from their model."""
    token = _running.set(None if context is None or positions_T is None else (context, positions_T))
    try:
        yield
    finally:
        _running.reset(token)


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
