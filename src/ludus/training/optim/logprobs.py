"""The forward pass over a micro-batch, and the log-probabilities of its trained tokens.

Rows go through the decoder end to end, or folded into a prefix forest. Only the places that predict a trained
token go through the head, in chunks: the logits of a whole batch never exist at once. A head that is a plain
matrix product goes through `linear_logprobs` (a fused linear cross-entropy); others, such as heads with an
adapter, through activation checkpointing over chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludus.core.failures import LudusError
from ludus.kernels import (
    arrays_to_device,
    free_memory,
    kept_gradient,
    linear_float32,
    logit_gradient,
    on_device,
    summarise_and_keep,
    summarise_logits,
    token_logprobs,
)
from ludus.model import (
    ForestContext,
    PackedContext,
    can_share_prefixes,
    head_logits,
    hidden_states,
    plain_head,
    sampling_mode,
    vocabulary_size,
)
from ludus.model.images import PlacedFeatures, placed_features, with_features
from ludus.training.data.batch import Batch
from ludus.training.data.micro_batches import MicroBatch, micro_batches
from ludus.training.optim.accumulation import measured
from ludus.training.optim.sharding import group_of

R = TypeVar("R")


def compute(model: nn.Module, function: Callable[..., R], *args: Any) -> R:
    """function(model, *args); of a sharded model inside its root's forward, where the parameters are whole."""
    inside = getattr(model, "compute", None)
    result: R = function(model, *args) if inside is None else inside(function, *args)
    return result


def packed_states(
    model: nn.Module, batch: MicroBatch, placed: PlacedFeatures | None = None
) -> tuple[Tensor, Tensor | None]:
    """(hidden_UD, index_T): the last hidden states, and where each token of the rows is among them.

    The index is None where every token was computed, in order. A token of a shared prefix has the hidden state
    that was computed for all of its rows.

    Args:
        model: The model, or the part that has its decoder.
        batch: The micro-batch, on the model's device.
        placed: The features of the images, where they are another model's than this one's.
    """
    device = batch.tokens_T.device
    if placed is None:
        placed = placed_features(model, batch.images)
    spatial_3T = None if placed is None else placed.positions(batch.lengths)
    ahead = None if placed is None else placed.ahead(len(batch.tokens_T))
    fold = batch.fold
    if fold is None:
        tokens_U, index_T, placed_U = batch.tokens_T, None, placed
        context = PackedContext(batch.lengths, device, ahead)
    elif ahead is not None:
        raise LudusError("tokens of images that see each other are not computed by shared prefixes")
    else:
        index_T, source_U = (arrays_to_device([one], device)[0] for one in (fold.index_T, fold.source_U))
        tokens_U = batch.tokens_T.index_select(0, source_U)
        placed_U = None if placed is None else placed.folded(fold.index_T)
        spatial_3T = None if spatial_3T is None else spatial_3T[:, fold.source_U]
        context = ForestContext(fold.lengths, fold.parents, device)
    if spatial_3T is None:
        positions = context.position_ids
    else:
        positions = arrays_to_device([np.ascontiguousarray(spatial_3T)], device)[0]
    inputs = with_features(model, tokens_U, placed_U)
    return hidden_states(model, tokens_U, positions, context, inputs), index_T


def at_places(values_U: Tensor, index_T: Tensor | None, place_A: Tensor) -> Tensor:
    """Gather values of the unique tokens at places in the rows: values_U[index_T[place_A]]."""
    return values_U.index_select(0, place_A if index_T is None else index_T.index_select(0, place_A))


_shares: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def shares_prefixes(model: nn.Module) -> bool:
    """Whether rows that begin alike may be folded for this model; all ranks do the same."""
    if model not in _shares:
        _shares[model] = bool(group_of(model).least(int(can_share_prefixes(model))))
    return _shares[model]


def action_logprobs(model: nn.Module, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """For each trained token: its log-probability, and the entropy of the distribution it came from."""
    return compute(model, _logprobs, batch, temperature)


def logprobs_of(
    model: nn.Module, batch: Batch, temperature: float, budget: int, *, share: bool = True
) -> Tensor:
    """The log-probability of each trained token under these weights, without gradient; 0 elsewhere.

    Nothing of a row that has no trained token is computed, and a prefix that rows `share` is computed once. No
    row may have its first token trained. Of a sharded model each rank computes its part; all have the result.
    """
    device = next(model.parameters()).device
    group = group_of(model)

    def logprobs(part: MicroBatch) -> Tensor:
        return action_logprobs(model, part, temperature)[0]

    with torch.no_grad(), sampling_mode(model), on_device(device):
        packed = micro_batches(batch, budget, ranks=group.size, share=share and shares_prefixes(model))
        found = list(measured(packed, budget, group, device, logprobs))
    result_T = np.zeros(len(batch.tokens_T), dtype=np.float32)
    for source_A, logprobs_A in found:  # read after all work has been queued: the device never waits
        result_T[source_A.numpy()] = logprobs_A.cpu().numpy()
    return group.total(torch.from_numpy(result_T))


def _logprobs(model: nn.Module, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """A trained token is predicted where the token before it in its row was computed."""
    hidden_UD, index_T = packed_states(model, batch)
    hidden_AD = at_places(hidden_UD, index_T, batch.trained_index_A - 1)
    tokens_A = batch.actions
    head = plain_head(model)
    if head is not None and hidden_AD.dtype == head.weight.dtype:
        return linear_logprobs(hidden_AD, head.weight, tokens_A, temperature)
    size = chunk_rows(vocabulary_size(model), tokens_A.device)
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


# Fused linear cross-entropy: the head's logits exist for one chunk of tokens at a time.
#
# The forward pass reduces a chunk's logits to log-probabilities and entropies and drops them; the backward pass
# computes them again and turns them into the gradients of the hidden states and of the head. Where the device
# has memory to spare, the exponentials of the first chunks are kept in half precision instead, and need not be
# computed twice (unless the loss has a gradient through the entropies).
#
# Logits are float32 whatever the weights are: rounding them to bf16 would be the largest error of all. So is
# the sum of the head's gradient over the chunks; it is rounded once, at the end.

_LEAST, _MOST = 1 << 28, 1 << 30
_SHARE = 1 / 128
_KEPT_LEAST, _KEPT_MOST = 1 / 96, 1 / 24
_PLENTY = 3 / 4
_HOST = 1 << 28


def chunk_bytes(device: torch.device) -> int:
    """Most bytes of a chunk's logits and their gradient: a small share of the device's memory."""
    if device.type != "cuda":
        return _HOST
    return _chunk_bytes(torch.cuda.get_device_properties(device).total_memory)


def _chunk_bytes(total: int) -> int:
    return int(min(_MOST, max(_LEAST, total * _SHARE)))


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """The places of a chunk."""
    return _chunk_rows(vocabulary, chunk_bytes(device))


def chunk_rows_of(vocabulary: int, total: int | None) -> int:
    """The places of a chunk on a GPU with so many bytes, or on a host."""
    return _chunk_rows(vocabulary, _HOST if total is None else _chunk_bytes(total))


def _chunk_rows(vocabulary: int, size: int) -> int:
    rows = size // (6 * vocabulary)  # 4 bytes of a logit, 2 of its gradient
    return max(128, rows // 128 * 128)  # matrix units like whole tiles


def kept_bytes(device: torch.device) -> int:
    """What exponentials that are kept for the backward pass may take; nothing on a host.

    A small share of the device's memory, and a larger one as long as most of it is free.
    """
    if device.type != "cuda":
        return 0
    return kept_bytes_of(*free_memory(device))


def kept_bytes_of(free: int, total: int) -> int:
    """What they may take on a GPU of which so many bytes are free."""
    return int(min(_KEPT_MOST * total, max(_KEPT_LEAST * total, free - _PLENTY * total)))


def kept_places(weight_VD: Tensor) -> int:
    """For how many places they are kept; for none in float32, where they would be no smaller than logits."""
    if weight_VD.dtype == torch.float32:
        return 0
    return kept_bytes(weight_VD.device) // (2 * len(weight_VD)) // 128 * 128


def linear_logprobs(
    hidden_AD: Tensor,
    weight_VD: Tensor,
    tokens_A: Tensor,
    temperature: float,
    rows: int | None = None,
    kept: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each token, entropy of its distribution), in float32.

    Args:
        hidden_AD: The hidden state from which each token was predicted.
        weight_VD: The head. It gets a gradient if it asks for one.
        tokens_A: The tokens.
        temperature: Logits are divided by it.
        rows: Places in a chunk; by the device's memory when left out.
        kept: Places whose exponentials are kept for the backward pass; by the device's memory when left out.
    """
    rows = rows or chunk_rows(len(weight_VD), hidden_AD.device)
    kept = kept_places(weight_VD) if kept is None else kept
    kept = kept if torch.is_grad_enabled() else 0  # inside the autograd function it is always disabled
    logprobs_A, entropies_A = _LinearLogprobs.apply(
        hidden_AD, weight_VD, tokens_A, temperature, rows, kept
    )
    return logprobs_A, entropies_A


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AD: Tensor,
        weight_VD: Tensor,
        tokens_A: Tensor,
        temperature: float,
        rows: int,
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        chosen_A, lse_A, entropies_A = (
            torch.empty(len(tokens_A), dtype=torch.float32, device=hidden_AD.device) for _ in range(3)
        )
        kept = min(kept, len(tokens_A)) if any(ctx.needs_input_grad) else 0
        kept_KV = hidden_AD.new_empty(kept, len(weight_VD), dtype=weight_VD.dtype)
        shifts: list[Tensor] = []
        for part in (*_chunks(0, kept, rows), *_chunks(kept, len(tokens_A), rows)):
            logits_cV = linear_float32(hidden_AD[part], weight_VD)
            if part.start < kept:
                found = summarise_and_keep(logits_cV, temperature, kept_KV[part])
                lse_A[part], entropies_A[part], shifts_cB = found
                shifts.append(shifts_cB)
            else:
                lse_A[part], entropies_A[part] = summarise_logits(logits_cV, temperature)
            chosen_A[part] = logits_cV.gather(1, tokens_A[part, None])[:, 0]
            del logits_cV  # before the next chunk's are made
        ctx.kept = (kept_KV, torch.cat(shifts)) if shifts else None
        ctx.save_for_backward(hidden_AD, weight_VD, tokens_A, lse_A, entropies_A)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)  # so that it can be seen whether the entropies matter
        return chosen_A / temperature - lse_A, entropies_A

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden_AD, weight_VD, tokens_A, lse_A, entropies_A = ctx.saved_tensors
        dlogprobs_A, dentropies_A = (
            torch.zeros_like(lse_A) if grad is None else grad.float().contiguous() for grad in grads
        )
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dhidden_AD = torch.empty_like(hidden_AD) if wants_hidden else None
        dweight_VD: Tensor | None = None

        def add(part: slice, dlogits_cV: Tensor) -> None:
            nonlocal dweight_VD
            if dhidden_AD is not None:
                torch.mm(dlogits_cV, weight_VD, out=dhidden_AD[part])
            if wants_weight:
                dweight_VD = add_product(dweight_VD, dlogits_cV, hidden_AD[part])

        kept, ctx.kept = ctx.kept, None
        first = 0
        if kept is not None and grads[1] is None:
            kept_KV, shifts_KB = kept
            first = len(kept_KV)
            own = slice(0, first)
            known = tokens_A[own], ctx.temperature, dlogprobs_A[own]
            add(own, kept_gradient(kept_KV, shifts_KB, *known))
            del kept_KV
        del kept
        for part in _chunks(first, len(tokens_A), ctx.rows):
            summary = lse_A[part], entropies_A[part]
            slopes = dlogprobs_A[part], dentropies_A[part]
            given = tokens_A[part], ctx.temperature, summary, *slopes, weight_VD.dtype
            add(part, logit_gradient(linear_float32(hidden_AD[part], weight_VD), *given))
        if dweight_VD is not None:
            dweight_VD = dweight_VD.to(weight_VD.dtype)
        return dhidden_AD, dweight_VD, None, None, None, None


def add_product(total_VD: Tensor | None, dlogits_cV: Tensor, hidden_cD: Tensor) -> Tensor:
    """total + dlogits^T hidden in float32, in place where there is a total."""
    left_Vc = dlogits_cV.t()
    if left_Vc.dtype == torch.float32:
        return left_Vc @ hidden_cD if total_VD is None else total_VD.addmm_(left_Vc, hidden_cD)
    if left_Vc.device.type != "cuda":
        product_VD = left_Vc.float() @ hidden_cD.float()
        return product_VD if total_VD is None else total_VD.add_(product_VD)
    if total_VD is None:
        return torch.mm(left_Vc, hidden_cD, out_dtype=torch.float32)
    torch.ops.aten.addmm.dtype_out(total_VD, left_Vc, hidden_cD, torch.float32, out=total_VD)
    return total_VD


def _chunks(first: int, count: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, count)) for start in range(first, count, rows))
