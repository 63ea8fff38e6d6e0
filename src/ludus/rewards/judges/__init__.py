"""Rewards that a language model gives: a judge by a rubric, one of steps, and RULER, which ranks a group.

`PairJudge` says which of two attempts is better, for reward models and DPO.
"""

from ludus.rewards.judges.judge import Judge
from ludus.rewards.judges.pairs import PairJudge
from ludus.rewards.judges.process import ProcessJudge
from ludus.rewards.judges.rubric import Criterion, Rubric, load_rubric
from ludus.rewards.judges.ruler import Ruler

__all__ = ["Criterion", "Judge", "PairJudge", "ProcessJudge", "Rubric", "Ruler", "load_rubric"]
