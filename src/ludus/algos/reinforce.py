"""REINFORCE with the batch's mean reward as its baseline.

    A_i = r_i - mean(r_1..r_N)

The baseline does not depend on the group, so tasks that are easier than the average push up whatever was
done on them; that is what GRPO's group baseline removes.

Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
Machine Learning 8, 1992.
"""

from __future__ import annotations

from torch import Tensor

from ludus.algos.credit import Credit


def reinforce(credit: Credit) -> Tensor:
    """Rewards less the batch's mean, one per action token."""
    return credit.spread(credit.rewards_N - credit.rewards_N.mean())
