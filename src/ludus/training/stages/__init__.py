"""The stages of a run: ways of learning, and measurements. The trainer runs any sequence of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ludus.training.run_context import RunContext
from ludus.training.settings import (
    DistillationConfig,
    EvaluationStageConfig,
    PreferenceConfig,
    RejectionConfig,
    RLConfig,
    SFTConfig,
    StageConfig,
    held_out_count,
)
from ludus.training.stages.base import EvaluationStage, Stage, StepResult
from ludus.training.stages.distillation import DistillationStage, check_teacher
from ludus.training.stages.preference import PreferenceStage, load_preferences
from ludus.training.stages.rl import RLStage
from ludus.training.stages.sft import (
    RejectionStage,
    SFTStage,
    has_expert,
    load_demonstrations,
    load_held_out,
)

log = logging.getLogger(__name__)

__all__ = ["Stage", "StepResult", "build_stage"]

_MAKERS: dict[type[Any], Any] = {
    SFTConfig: SFTStage,
    RLConfig: RLStage,
    PreferenceConfig: PreferenceStage,
    RejectionConfig: RejectionStage,
    DistillationConfig: DistillationStage,
    EvaluationStageConfig: EvaluationStage,
}


def build_stage(context: RunContext, folder: Path, config: StageConfig) -> Stage:
    """The stage that a config describes. `folder` is its place in the run's folder."""
    made: Stage = _MAKERS[type(config)](context, folder, config)
    return made


async def check_stage_data(context: RunContext, config: StageConfig) -> None:
    """Read what a stage will be given, to find out now what is wrong with it."""
    if isinstance(config, DistillationConfig):
        check_teacher(context, config)
    if isinstance(config, PreferenceConfig) and config.pairs is not None:
        what = "labelled answers" if config.loss == "kto" else "pairs"
        _note_batch(context, config, len(await load_preferences(context, config)), what)
    if isinstance(config, SFTConfig):
        await load_held_out(context, config)
        if has_expert(context, config):  # plays each task of the first set once
            found = len(context.task_sets[0].tasks)
        else:
            found = len(await load_demonstrations(context, config))
        _note_batch(context, config, found - held_out_count(config, found), "demonstrations")


def _note_batch(
    context: RunContext, config: SFTConfig | PreferenceConfig, found: int, what: str
) -> None:
    """Warn of steps that go over the same data several times: they take as much longer, and teach no more."""
    where = next(name for name, stage in context.recipe.named_stages if stage is config)
    if config.batch > found:
        log.warning(
            "%s.batch = %d is larger than the data (%d %s): every step goes over all of it %.3g times, and "
            "takes as much longer. Set %s.batch=%d, or less",
            *(where, config.batch, found, what, config.batch / found, where, found),
        )
