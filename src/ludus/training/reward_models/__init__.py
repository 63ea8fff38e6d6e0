"""Reward models: trained on preferences (one head per dimension) or on scored steps, and used as rewards."""

from __future__ import annotations

from ludus.training.reward_models.fit import RewardModelConfig, RewardModelResult, fit_reward_model
from ludus.training.reward_models.model import (
    ModelReward,
    RewardModel,
    StepModelReward,
    load_reward_model,
    save_reward_model,
)

__all__ = [
    "ModelReward",
    "RewardModel",
    "RewardModelConfig",
    "RewardModelResult",
    "StepModelReward",
    "fit_reward_model",
    "load_reward_model",
    "save_reward_model",
]
