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
from ludus.training.stages.base import EvaluationStage, Stage, StepResult
from ludus.training.stages.distillation import DistillationStage
from ludus.training.stages.preference import PreferenceStage
from ludus.training.stages.rl import RLStage
from ludus.training.stages.sft import RejectionStage, SFTStage

__all__ = ["STAGES", "Stage", "StepResult", "stage_class"]

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
