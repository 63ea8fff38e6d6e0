"""The stages of a run, one module for each way of learning."""

from __future__ import annotations

from typing import Any

from ludus.training.config.recipe import StageConfig
from ludus.training.config.rl import RLConfig
from ludus.training.config.stages import (
    DistillationConfig,
    EvaluationStageConfig,
    PreferenceConfig,
    RejectionConfig,
    SFTConfig,
)
from ludus.training.ranks.steps import StageTrainer
from ludus.training.stages.base import EvaluationStage, Stage, StepResult
from ludus.training.stages.distillation import DistillationStage, DistillationTrainer
from ludus.training.stages.preference import PreferenceStage, PreferenceTrainer
from ludus.training.stages.rl import RLStage, RLTrainer
from ludus.training.stages.sft import RejectionStage, SFTStage, SFTTrainer

__all__ = ["STAGES", "Stage", "StepResult", "stage_class", "trainer_class"]

STAGES: dict[type[Any], type[Stage[Any]]] = {
    SFTConfig: SFTStage,
    RLConfig: RLStage,
    PreferenceConfig: PreferenceStage,
    RejectionConfig: RejectionStage,
    DistillationConfig: DistillationStage,
    EvaluationStageConfig: EvaluationStage,
}


def stage_class(config: StageConfig) -> type[Stage[Any]]:
    """The class of the stage that a config describes."""
    return STAGES[type(config)]


TRAINERS: dict[type[Any], type[StageTrainer[Any]]] = {
    SFTConfig: SFTTrainer,
    RLConfig: RLTrainer,
    PreferenceConfig: PreferenceTrainer,
    RejectionConfig: SFTTrainer,
    DistillationConfig: DistillationTrainer,
}


def trainer_class(config: StageConfig) -> type[StageTrainer[Any]]:
    """The trainer class of the stage that a config describes."""
    return TRAINERS[type(config)]
