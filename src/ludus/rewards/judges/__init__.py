"""Rewards that a language model gives: a judge by a rubric, and RULER, which ranks a group."""

from ludus.rewards.judges.judge import Judge
from ludus.rewards.judges.rubric import Criterion, Rubric, load_rubric
from ludus.rewards.judges.ruler import Ruler

__all__ = ["Criterion", "Judge", "Rubric", "Ruler", "load_rubric"]
