"""Dr. GRPO: GRPO without the two divisions that bias it.

    A_i = r_i - mean(r_1..r_G)

Dividing by the group's deviation gives tasks that are almost always or almost never solved more weight than
the others; dividing by an episode's length makes long failures cheap. The first division is left out here.
For the second, take the aggregation "length", which divides by a constant.

Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", 2025, arXiv:2503.20783.
"""

from __future__ import annotations

from ludus.algos.credit import Credit, Estimate, Need, needs
from ludus.algos.moments import centred


@needs(Need.SIBLINGS)
def dr_grpo(credit: Credit) -> Estimate:
    """Rewards less the group's mean, one per action token."""
    return credit.spread(centred(credit.totals, credit.group_N))
