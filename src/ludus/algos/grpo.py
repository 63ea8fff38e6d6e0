"""GRPO: an attempt is worth how much better it was than its siblings.

    A_i = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-6)

The standard deviation is the unbiased one (divided by G - 1), as in the paper's code. A group of one, or
one whose rewards are all equal, carries no signal: its advantages are 0. The algorithm of this name averages
the loss by token, as DAPO does (and TRL and verl by default); the paper averages within each episode first:
`aggregation = "sequence"`.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024,
arXiv:2402.03300.
"""

from __future__ import annotations

from ludus.algos.credit import Credit, Estimate, Need, needs
from ludus.algos.moments import standardised


@needs(Need.SIBLINGS)
def grpo(credit: Credit) -> Estimate:
    """Group-normalised rewards, one per action token."""
    return credit.spread(standardised(credit.totals, credit.group_N))
