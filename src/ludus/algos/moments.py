"""Means and deviations within groups, and sums backwards along episodes: what the estimators share.

An owner is whatever a number belongs to: a group, a task set, a trajectory. Owners are whole numbers from
0, in any order; a number without company has deviation 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a deviation that divides."""


def owners(owner_S: Tensor) -> int:
    """How many there are."""
    return int(owner_S.max()) + 1 if owner_S.numel() else 0


def sum_within(values_S: Tensor, owner_S: Tensor, count: int | None = None) -> Tensor:
    """One sum for each owner."""
    size = owners(owner_S) if count is None else count
    return values_S.new_zeros(size).index_add(0, owner_S, values_S)


def size_within(owner_S: Tensor, dtype: torch.dtype) -> Tensor:
    """For each number, how many its owner has."""
    return torch.bincount(owner_S, minlength=owners(owner_S)).to(dtype)[owner_S]


def centred(values_S: Tensor, owner_S: Tensor) -> Tensor:
    """Each number less its owner's mean; exactly 0 where an owner's numbers are all equal.

    Exactly, because rounding in the mean would otherwise leave a trace, which a division by a deviation
    of the same order would blow up into a signal.
    """
    size_S = size_within(owner_S, values_S.dtype)
    mean_S = sum_within(values_S, owner_S)[owner_S] / size_S
    return torch.where(_all_equal(values_S, owner_S), 0, values_S - mean_S)


def standardised(values_S: Tensor, owner_S: Tensor, epsilon: float = EPSILON) -> Tensor:
    """(x - mean) / (deviation + epsilon) within each owner, the deviation being the unbiased one."""
    from_mean_S = centred(values_S, owner_S)
    size_S = size_within(owner_S, values_S.dtype)
    variance_S = sum_within(from_mean_S**2, owner_S)[owner_S] / (size_S - 1).clamp(min=1)
    return from_mean_S / (variance_S.sqrt() + epsilon)


def sum_backwards(values_S: Tensor, decay_S: Tensor, owner_S: Tensor) -> Tensor:
    """y_s = x_s + decay_s * y_(next s of the same owner), and x_s for an owner's last.

    By doubling: after round k each number holds the next 2^k of its owner, so there are log2(longest) rounds
    of whole-tensor operations and no padding.
    """
    order_S = owner_S.argsort(stable=True)
    owner_S, sums_S, factor_S = owner_S[order_S], values_S[order_S], decay_S[order_S]
    step = 1
    while step < len(owner_S):
        together = owner_S[:-step] == owner_S[step:]
        if not bool(together.any()):
            break
        reach = torch.where(together, factor_S[:-step], 0)
        ends = sums_S.new_zeros(step)
        sums_S = sums_S + torch.cat([reach * sums_S[step:], ends])
        factor_S = torch.cat([reach * factor_S[step:], ends])
        step *= 2
    return torch.empty_like(sums_S).index_copy(0, order_S, sums_S)


def _all_equal(values_S: Tensor, owner_S: Tensor) -> Tensor:
    empty = values_S.new_zeros(owners(owner_S))
    most = empty.scatter_reduce(0, owner_S, values_S, "amax", include_self=False)
    least = empty.scatter_reduce(0, owner_S, values_S, "amin", include_self=False)
    return (most == least)[owner_S]
