"""Rewards: plain Python functions that score episodes, their composition, and a first library."""

from ludus.core.trajectory import is_success
from ludus.rewards.arithmetic import numeric
from ludus.rewards.check import Finding, Problem, RewardReport, check_rewards, synthetic_episode
from ludus.rewards.compose import Composite, FormatGate, Gate, ToolBonus, Weighted, combine
from ludus.rewards.curiosity import CountBonus, Curiosity
from ludus.rewards.efficiency import Efficiency
from ludus.rewards.evaluate import TurnReward
from ludus.rewards.format import Format
from ludus.rewards.function import FunctionReward, FunctionTurnReward, reward
from ludus.rewards.groups import FunctionGroupReward, group_reward
from ludus.rewards.match import contains, exact_match, f1
from ludus.rewards.mathematics import maths
from ludus.rewards.ranking import Ranking
from ludus.rewards.registry import GROUP_REWARDS, REWARDS, build_group_reward, build_reward
from ludus.rewards.scorer import Scorer

__all__ = [
    "GROUP_REWARDS",
    "REWARDS",
    "Composite",
    "CountBonus",
    "Curiosity",
    "Efficiency",
    "Finding",
    "Format",
    "FormatGate",
    "FunctionGroupReward",
    "FunctionReward",
    "FunctionTurnReward",
    "Gate",
    "Problem",
    "Ranking",
    "RewardReport",
    "Scorer",
    "ToolBonus",
    "TurnReward",
    "Weighted",
    "build_group_reward",
    "build_reward",
    "check_rewards",
    "combine",
    "contains",
    "exact_match",
    "f1",
    "group_reward",
    "is_success",
    "maths",
    "numeric",
    "reward",
    "synthetic_episode",
]
