"""The critic's loss.

    L_t = max((V - R)^2, (clip(V, V_old - bound, V_old + bound) - R)^2) / 2

R is `Estimate.returns_T`, V_old what the critic said when the step began. The larger of the two errors
counts, so that a value that has moved further than the bound in one step gets no gradient for going on.

As in the code of Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algos.losses import Metrics


def value_loss(
    values_A: Tensor, old_A: Tensor, returns_A: Tensor, *, bound: float | None = 0.5
) -> tuple[Tensor, Metrics]:
    """Half the squared error of each value; None leaves out the bound."""
    free_A = (values_A - returns_A) ** 2
    if bound is None:
        return free_A / 2, {"value_clip_fraction": torch.zeros_like(free_A)}
    near_A = torch.maximum(torch.minimum(values_A, old_A + bound), old_A - bound)
    bound_A = (near_A - returns_A) ** 2
    clipped_A = (bound_A > free_A).to(free_A.dtype)
    return torch.maximum(free_A, bound_A) / 2, {"value_clip_fraction": clipped_A}
