"""REINFORCE++: no critic and no groups; token rewards, their discounted sum, and one normalisation.

    r_t = penalty_t + [pay of the turn that ends at t] + [rest of the total, at the last action token]
    G_t = r_t + discount * G_(next action token)
    A_t = (G_t - mean(G)) / (std(G) + 1e-8)        over all action tokens of the batch

The penalty is -beta times the divergence from a reference (`kl_reward`), which is where this method puts it.
Observations are skipped: neither do they carry a reward nor do they discount one.

Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
2025, arXiv:2501.03262.
"""

from __future__ import annotations

import torch

from ludus.algos.credit import Credit, Estimate
from ludus.algos.landing import token_rewards
from ludus.algos.moments import sum_backwards
from ludus.algos.options import Share
from ludus.algos.whitening import whitened


def reinforce_pp(credit: Credit, *, discount: Share = 1.0) -> Estimate:
    """The normalised return from each action token on."""
    said = credit.action_T.nonzero().squeeze(1)
    rewards_A = token_rewards(credit)[said]
    returns_A = sum_backwards(rewards_A, torch.full_like(rewards_A, discount), credit.trajectory_T[said])
    returns_T = rewards_A.new_zeros(len(credit.action_T)).index_copy(0, said, returns_A)
    return Estimate(whitened(returns_T, credit))
