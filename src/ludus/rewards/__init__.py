"""Rewards: plain Python functions that score episodes, their composition, and a first library."""

from ludus.core.trajectory import is_success
from ludus.rewards.check import (
    RewardFinding,
    RewardProblem,
    RewardReport,
    check_rewards,
    synthetic_episode,
)
from ludus.rewards.compose import Composite, Efficiency, FormatGate, Gate, ToolBonus, Weighted, combine
from ludus.rewards.conduct_rewards import CountBonus, Curiosity, Ranking
from ludus.rewards.registry import GROUP_REWARDS, REWARDS, build_group_reward, build_reward
from ludus.rewards.reward import (
    FunctionGroupReward,
    FunctionReward,
    FunctionTurnReward,
    group_reward,
    reward,
)
from ludus.rewards.scorer import Scorer, TurnReward
from ludus.rewards.text_rewards import Format, contains, exact_match, f1, maths, numeric

__all__ = [
    "GROUP_REWARDS",
    "REWARDS",
    "Composite",
    "CountBonus",
    "Curiosity",
    "Efficiency",
    "Format",
    "FormatGate",
    "FunctionGroupReward",
    "FunctionReward",
    "FunctionTurnReward",
    "Gate",
    "Ranking",
    "RewardFinding",
    "RewardProblem",
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
