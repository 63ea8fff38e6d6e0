"""Attention over a paged KV cache: keys and values in blocks [blocks, Hkv, block_size, D].

Triton kernels (`triton_attention`) where they are available, plain torch elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.kernels.device import unavailable


def paged_decode(
    query_RHD: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables_RB: Tensor,
    lengths_R: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Weighted values [R, Hq, D] of one new token a row, the last of its context.

    `block_tables_RB` (int32) has the blocks of each row in order, `lengths_R` (int32) counts its tokens, the
    new one included; a row of length 0 is idle, and its result is finite and meaningless. With a window, a
    token sees itself and the `window - 1` tokens before it.
    """
    if unavailable(query_RHD.device) is None:
        from ludus.kernels import triton_attention

        return triton_attention.decode(
            query_RHD.contiguous(),
            keys,
            values,
            block_tables_RB,
            lengths_R,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )
    starts = torch.arange(len(lengths_R) + 1, dtype=torch.int32, device=lengths_R.device)
    return _attention_reference(
        query_RHD, keys, values, block_tables_RB, starts, lengths_R, scaling, window, softcap
    )


def paged_prefill(
    query_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables_RB: Tensor,
    starts_R1: Tensor,
    lengths_R: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Weighted values [T, Hq, D] of several new tokens a row, each seeing its context up to itself.

    Row r's new tokens lie from starts_R1[r] to starts_R1[r + 1] (int32); a row may have none. Tokens behind the
    last row's get a meaningless result.
    """
    if unavailable(query_THD.device) is None:
        from ludus.kernels import triton_attention

        return triton_attention.prefill(
            query_THD.contiguous(),
            keys,
            values,
            block_tables_RB,
            starts_R1,
            lengths_R,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )
    return _attention_reference(
        query_THD, keys, values, block_tables_RB, starts_R1, lengths_R, scaling, window, softcap
    )


def _attention_reference(
    query_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables_RB: Tensor,
    starts_R1: Tensor,
    lengths_R: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The reference: row by row, in plain torch."""
    out_THD = torch.zeros_like(query_THD)
    group = query_THD.shape[1] // keys.shape[1]
    starts = starts_R1.tolist()
    for row, length in enumerate(lengths_R.tolist()):
        start, stop = starts[row], starts[row + 1]
        if length == 0 or start == stop:
            continue
        used = block_tables_RB[row, : -(-length // keys.shape[2])].long()
        key, value = (
            states[used].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(group, dim=1)
            for states in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", query_THD[start:stop].float(), key.float()) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(length - (stop - start), length, device=scores.device)[:, None]
        other = torch.arange(length, device=scores.device)[None, :]
        masked = other > own
        if window is not None:
            masked = masked | (other <= own - window)
        weights = scores.masked_fill(masked, float("-inf")).softmax(-1)
        out_THD[start:stop] = torch.einsum("hqk,khd->qhd", weights, value.float()).to(out_THD.dtype)
    return out_THD
