"""GiGPO: siblings are compared twice, as whole episodes and wherever they stood in the same state.

    A^E_i     = (r_i - mean(r)) / (std(r) + 1e-6)                      over the group
    A^S_(i,u) = (R_(i,u) - mean(R)) / (std(R) + 1e-6)                  over the turns of the group taken in
                                                                       the same state
    A         = A^E + step_weight * A^S,      R_(i,u) = r_(i,u) + discount * R_(i,u+1)

An episode that comes through a state twice is in the comparison twice. A state that only one turn of the
group was taken in, or an unknown one (a negative anchor), has nothing to compare: its A^S is 0. Without
`normalise` the deviations are left out, as in the paper's second form.

Feng et al., "Group-in-Group Policy Optimization for LLM Agent Training", 2025, arXiv:2505.10978.
"""

from __future__ import annotations

import torch

from ludus.algos.credit import Credit, Estimate, Need, needs, required
from ludus.algos.landing import turn_returns
from ludus.algos.moments import centred, standardised
from ludus.algos.options import NotNegative, Share


@needs(Need.SIBLINGS, Need.TURNS, Need.ANCHORS)
def gigpo(
    credit: Credit, *, discount: Share = 0.95, step_weight: NotNegative = 1.0, normalise: bool = True
) -> Estimate:
    """Episode-level plus step-level group-relative advantages, one per action token.

    Args:
        credit: The batch, with turns and anchors.
        discount: By which each later turn counts less in a step's return.
        step_weight: Weight of the step-level part (omega).
        normalise: Whether to divide by the standard deviations.
    """
    compare = standardised if normalise else centred
    trajectory_U = required(credit.trajectory_U, "trajectory_U")
    anchor_U = required(credit.anchor_U, "anchor_U")
    known = (anchor_U >= 0).nonzero().squeeze(1)
    states = torch.stack([credit.group_N[trajectory_U[known]], anchor_U[known]])
    state_k = torch.unique(states, dim=1, return_inverse=True)[1]
    returns_U = turn_returns(credit, discount)
    step_U = torch.zeros_like(returns_U).index_copy(0, known, compare(returns_U[known], state_k))
    episode_N = compare(credit.totals, credit.group_N)
    return credit.spread_turns(episode_N[trajectory_U] + step_weight * step_U)
