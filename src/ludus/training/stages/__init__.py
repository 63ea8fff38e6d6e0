"""The stages of a run: ways of learning, and measurements. The trainer runs any sequence of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ludus.training.settings import (
    DistillationConfig,
    ImitationConfig,
    MeasurementConfig,
    PreferenceConfig,
    RejectionConfig,
    RLConfig,
    StageConfig,
)
from ludus.training.stages.distilling import Distillation
from ludus.training.stages.imitating import Imitation
from ludus.training.stages.measuring import Measurement
from ludus.training.stages.preferring import Preference
from ludus.training.stages.reinforcing import Reinforcement
from ludus.training.stages.rejecting import Rejection
from ludus.training.stages.stage import Stage, Step
from ludus.training.workshop import Workshop

__all__ = ["Stage", "Step", "build_stage"]

_MAKERS: dict[type[Any], Any] = {
    ImitationConfig: Imitation,
    RLConfig: Reinforcement,
    PreferenceConfig: Preference,
    RejectionConfig: Rejection,
    DistillationConfig: Distillation,
    MeasurementConfig: Measurement,
}


def build_stage(workshop: Workshop, folder: Path, config: StageConfig) -> Stage:
    """The stage that a config describes. `folder` is its place in the run's folder."""
    made: Stage = _MAKERS[type(config)](workshop, folder, config)
    return made
