"""Rewards that a language model gives: judges by a rubric or of steps, RULER, verdicts on code.

`PairJudge` says which of two attempts is better, for reward models and DPO.
"""

from ludus.rewards.check import Agreement, LabelledAnswer, measure_agreement
from ludus.rewards.judges.comparisons import PairJudge, Ruler
from ludus.rewards.judges.judge import CodeQuality, Judge, ModelMatch, ProcessJudge, SemiFormal
from ludus.rewards.judges.rubric import Criterion, EvolutionConfig, Rubric, load_rubric

__all__ = [
    "Agreement",
    "CodeQuality",
    "Criterion",
    "EvolutionConfig",
    "Judge",
    "LabelledAnswer",
    "ModelMatch",
    "PairJudge",
    "ProcessJudge",
    "Rubric",
    "Ruler",
    "SemiFormal",
    "load_rubric",
    "measure_agreement",
]
