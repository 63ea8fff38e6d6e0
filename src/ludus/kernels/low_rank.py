"""What adapters add to a product: a matrix of low rank each, applied as its two factors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ludus.kernels.support import unavailable

Columns = Sequence[tuple[int, int]]
"""Of each adapter the first column that it adds to, and how many."""


def low_rank_add(
    out_TN: Tensor, x_TD: Tensor, down_RD: Tensor, up_MK: Tensor, columns: Columns, scaling: float
) -> Tensor:
    """Add scaling * (x down^T) up^T to `out`, in place; all but `x` are contiguous.

    `down` holds the adapters' first factors one below the other, K rows each, and `up` their second ones. They
    may be finer than `x`. Sums are float32, and so is what comes back: x down^T in P parts [P, T, R] to be
    summed.
    """
    if unavailable(x_TD.device) is None:
        from ludus.kernels.compiled import low_rank

        return low_rank.add(out_TN, x_TD, down_RD, up_MK, columns, scaling)
    return plain_low_rank_add(out_TN, x_TD, down_RD, up_MK, columns, scaling)


def plain_low_rank_add(
    out_TN: Tensor, x_TD: Tensor, down_RD: Tensor, up_MK: Tensor, columns: Columns, scaling: float
) -> Tensor:
    """The same by plain operations."""
    inner_TR = x_TD.float() @ down_RD.float().t()
    inner = inner_TR.split(up_MK.shape[1], dim=1)
    ups = up_MK.float().split([width for _, width in columns])
    for own_TK, up, (first, width) in zip(inner, ups, columns, strict=True):
        part = out_TN[:, first : first + width]
        part.copy_(part.float() + scaling * (own_TK @ up.t()))
    return inner_TR[None]
