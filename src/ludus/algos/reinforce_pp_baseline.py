"""REINFORCE++-baseline: the group's mean as the baseline, the batch's deviation as the scale.

    A_i = r_i - mean(r_1..r_G)                     within the group
    A_t = (A - mean(A)) / (std(A) + 1e-8)          over all action tokens of the batch

Against GRPO: one scale for the whole batch, so that a group whose rewards hardly differ is not blown up.

Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
2025, arXiv:2501.03262, section on the variant with a baseline.
"""

from __future__ import annotations

from ludus.algos.credit import Credit, Estimate, Need, needs
from ludus.algos.moments import centred
from ludus.algos.whitening import whitened


@needs(Need.SIBLINGS)
def reinforce_pp_baseline(credit: Credit) -> Estimate:
    """Rewards less the group's mean, normalised over the batch's action tokens."""
    centred_N = centred(credit.totals, credit.group_N)
    return Estimate(whitened(centred_N[credit.trajectory_T], credit))
