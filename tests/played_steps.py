"""Steps on episodes, as stages make them: rows on rank 0, and the step that every rank does on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ludus.core import Trajectory
from ludus.model import context_limit
from ludus.training import (
    Batch,
    Learner,
    PreferenceConfig,
    RLConfig,
    RolloutBatch,
    policy_rows,
)
from ludus.training import policy_update as update_on_rows
from ludus.training import sft_step as sft_step_on_rows
from ludus.training.stages import distillation, preference, sft


def policy_update(
    learner: Learner, played: RolloutBatch, config: RLConfig, **others: Any
) -> dict[str, float]:
    return update_on_rows(learner, policy_rows(played, config), config, **others)


def sft_step(learner: Learner, shown: Sequence[Trajectory], at: int | None = None) -> dict[str, float]:
    return sft_step_on_rows(learner, Batch.of(shown), at)


def loss_on(learner: Learner, shown: Sequence[Trajectory]) -> float:
    return sft.loss_on(learner, Batch.of(shown))


def distill(learner: Learner, said: Sequence[Trajectory], teacher: nn.Module) -> dict[str, float]:
    return distillation.distill(learner, Batch.of(said), teacher)


def prefer(
    learner: Learner,
    given: Sequence[preference.Pair | preference.Labelled],
    reference: nn.Module | None,
    config: PreferenceConfig,
) -> dict[str, float]:
    rows = preference.preference_rows(given, config, context_limit(learner.model))
    return preference.prefer(learner, rows, reference, config)
