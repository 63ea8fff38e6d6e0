"""What an advantage estimator reads: rewards, groups, and which tokens are actions.

Shapes in names: N trajectories, G of them in a group, T tokens packed end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Credit:
    """A batch as estimators see it. Failed episodes are not in it, so no baseline can include them."""

    rewards_N: Tensor
    """The total reward of each trajectory."""
    group_N: Tensor
    """The group each trajectory belongs to: whole numbers from 0, all of them used."""
    trajectory_T: Tensor
    """The trajectory each token belongs to."""
    action_T: Tensor
    """True where the model said the token."""

    def spread(self, advantages_N: Tensor) -> Tensor:
        """One number per trajectory, given to each of its action tokens; 0 elsewhere."""
        return advantages_N[self.trajectory_T] * self.action_T


Estimator = Callable[[Credit], Tensor]
"""From a batch to one advantage per token; 0 where the token is not an action."""


def group_mean(values_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor]:
    """For each trajectory, the mean over its group and the group's size."""
    groups = int(group_N.max()) + 1 if group_N.numel() else 0
    size_g = torch.bincount(group_N, minlength=groups).to(values_N.dtype)
    sum_g = torch.zeros(groups, dtype=values_N.dtype, device=values_N.device)
    sum_g = sum_g.index_add(0, group_N, values_N)
    return (sum_g / size_g)[group_N], size_g[group_N]
