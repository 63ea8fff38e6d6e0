"""LoRA: what adapters add to a product, a matrix of low rank each, applied as its two factors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ludus.kernels.device import trial_failure, unavailable

log = logging.getLogger(__name__)

Columns = Sequence[tuple[int, int]]
"""(first column, number of columns) of each adapter's output."""


def low_rank_add(
    out_TN: Tensor, x_TD: Tensor, down_RD: Tensor, up_MK: Tensor, columns: Columns, scaling: float
) -> Tensor:
    """Add scaling * (x down^T) up^T to `out`, in place; all but `x` are contiguous.

    `down` holds the adapters' first factors one below the other, K rows each, and `up` their second ones. They
    may be finer than `x`. Sums are float32, and so is what comes back: x down^T in P parts [P, T, R] to be
    summed.
    """
    if unavailable(x_TD.device) is None:
        from ludus.kernels import triton_lora

        return triton_lora.add(out_TN, x_TD, down_RD, up_MK, columns, scaling)
    return low_rank_add_reference(out_TN, x_TD, down_RD, up_MK, columns, scaling)


def low_rank_add_reference(
    out_TN: Tensor, x_TD: Tensor, down_RD: Tensor, up_MK: Tensor, columns: Columns, scaling: float
) -> Tensor:
    """`low_rank_add` in plain torch."""
    inner_TR = x_TD.float() @ down_RD.float().t()
    inner = inner_TR.split(up_MK.shape[1], dim=1)
    ups = up_MK.float().split([width for _, width in columns])
    for own_TK, up, (first, width) in zip(inner, ups, columns, strict=True):
        part = out_TN[:, first : first + width]
        part.copy_(part.float() + scaling * (own_TK @ up.t()))
    return inner_TR[None]


@cache
def low_rank_unusable(device: torch.device) -> bool:
    """Whether the kernels fail a trial against plain torch on this device."""
    if unavailable(device) is not None:
        return False  # plain torch is used here
    reason = trial_failure(_lora_agrees, device, "the kernels give other numbers than plain operations")
    if reason is not None:
        log.warning("adapters are computed layer by layer on %s, which is slower: %s", device, reason)
    return reason is not None


def _lora_agrees(device: torch.device) -> bool:
    """Whether two adapters add to a few numbers what they should."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(20, 90), (20, 700), (10, 700), (80, 5)]
    out, x, down, up = (torch.randn(*size, generator=draw) for size in sizes)
    columns = ((0, 40), (50, 40))
    results = []
    for add, place in ((low_rank_add, device), (low_rank_add_reference, torch.device("cpu"))):
        sums = out.bfloat16().to(place, copy=True)
        add(sums, x.bfloat16().to(place), down.to(place), up.to(place), columns, 0.1)
        results.append(sums.float().cpu())
    return bool((results[0] - results[1]).norm() < 0.01 * results[1].norm())
