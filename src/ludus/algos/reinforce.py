"""REINFORCE with the batch's mean reward as its baseline.

    A_i = r_i - mean(r_1..r_N)

The baseline does not depend on the group, so tasks that are easier than the average push up whatever was
done on them; that is what GRPO's group baseline removes. Task sets have a mean each.

Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
Machine Learning 8, 1992.
"""

from __future__ import annotations

from ludus.algos.credit import Credit, Estimate
from ludus.algos.moments import centred


def reinforce(credit: Credit) -> Estimate:
    """Rewards less the batch's mean, one per action token."""
    return credit.spread(centred(credit.totals, credit.sets))
