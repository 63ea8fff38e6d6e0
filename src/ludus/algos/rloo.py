"""RLOO: REINFORCE, the baseline being the mean of the other attempts at the same task.

    A_i = r_i - mean(r_j, j != i) = G / (G - 1) * (r_i - mean(r_1..r_G))

The whole episode is one action: the loss is -A_i log p(episode i), the sum over its tokens, averaged over
episodes (the aggregation "sequence_sum"). Divided by the length, long and short episodes would get another
gradient than the paper's. The ratio is clipped token by token; TRL clips the whole sequence's. The two differ
after the first update of a step alone.

The baseline does not contain the attempt's own reward, so the gradient is unbiased. A group of one has no
baseline, and its advantage is 0.

Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", ICLR workshop 2019; Ahmadian et al., "Back
to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs", 2024,
arXiv:2402.14740.
"""

from __future__ import annotations

from ludus.algos.credit import Credit, Estimate, Need, needs
from ludus.algos.moments import centred, size_within


@needs(Need.SIBLINGS)
def rloo(credit: Credit) -> Estimate:
    """Rewards less the mean of the others in the group, one per action token."""
    size_N = size_within(credit.group_N, credit.totals.dtype)
    own_share_N = size_N / (size_N - 1).clamp(min=1)
    return credit.spread(centred(credit.totals, credit.group_N) * own_share_N)
