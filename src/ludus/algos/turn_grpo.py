"""Turn-level group-relative credit: each turn against what the siblings went on to earn from that turn on.

    R_(i,u) = r_(i,u) + discount * R_(i,u+1)
    A_(i,u) = (R_(i,u) - mean_j R_(j, min(u, U_j))) / (std_j R_(j, min(u, U_j)) + 1e-6)

U_j is the last turn of sibling j. Episodes differ in how many turns they have, and that biases the obvious
baselines. The mean over all turns of the group counts long episodes, which are mostly the failing ones, many
times, and it is the same for early and late turns although discounted returns are not. The mean over those
that reached turn u leaves out whoever was done before, which are mostly the succeeding ones. Here each
sibling counts exactly once at every turn: at the same turn, or, if it was over by then, at its last. One
that never acted counts with its total.

With discount 1 and nothing paid to single turns this is GRPO, to the letter. Identical siblings teach
nothing. A group of one has advantage 0.

The idea of turn-level credit in groups: Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via
Turn-Level Credit Assignment", 2025, arXiv:2505.11821. The treatment of ragged turn counts is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algos.credit import Credit, Estimate, Need, needs, required
from ludus.algos.landing import turn_returns
from ludus.algos.moments import centred, standardised
from ludus.algos.options import Share


@needs(Need.SIBLINGS, Need.TURNS)
def turn_grpo(credit: Credit, *, discount: Share = 1.0, normalise: bool = True) -> Estimate:
    """Group-normalised returns from each turn on, one per action token.

    Args:
        credit: The batch, with turns.
        discount: By which each later turn counts less.
        normalise: Whether to divide by the standard deviation.
    """
    trajectory_U = required(credit.trajectory_U, "trajectory_U")
    returns_U = turn_returns(credit, discount)
    turns_N = torch.bincount(trajectory_U, minlength=len(credit.rewards_N))
    most = int(turns_N.max()) if turns_N.numel() else 0
    if most == 0:
        return Estimate(credit.rewards_N.new_zeros(len(credit.action_T)))
    order_U = trajectory_U.argsort(stable=True)
    first_N = turns_N.cumsum(0) - turns_N
    rank_U = torch.empty_like(order_U)
    rank_U[order_U] = torch.arange(len(order_U), device=order_U.device) - first_N[trajectory_U[order_U]]

    returns_NK = _at_each_turn(credit, returns_U[order_U], first_N, turns_N, most)
    owner_NK = credit.group_N[:, None] * most + torch.arange(most, device=order_U.device)
    compare = standardised if normalise else centred
    advantages_NK = compare(returns_NK.flatten(), owner_NK.flatten()).view_as(returns_NK)
    return credit.spread_turns(advantages_NK[trajectory_U, rank_U])


def _at_each_turn(
    credit: Credit, sorted_U: Tensor, first_N: Tensor, turns_N: Tensor, most: int
) -> Tensor:
    """What each trajectory stands for at turns 0 .. most - 1."""
    turn_K = torch.arange(most, device=first_N.device)
    place_NK = first_N[:, None] + torch.minimum(turn_K, (turns_N[:, None] - 1).clamp(min=0))
    returns_NK = sorted_U[place_NK.clamp(max=len(sorted_U) - 1)]
    return torch.where(turns_N[:, None] > 0, returns_NK, credit.totals[:, None])
