"""Training: recipes (`config`), data, models, gradient steps (`optim`), stages, the loop, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.training.api import Result, evaluate, rollout, train, train_async
    from ludus.training.checkpoint import RunProgress, save_model
    from ludus.training.config.parts import Parts, TaskSetSpec, load_parts, task_set_specs
    from ludus.training.config.recipe import Recipe, load_recipe
    from ludus.training.config.rl import BrokenConfig, CriticConfig, RLConfig, RolloutSettings
    from ludus.training.config.run import LoraConfig, ModelConfig, ScratchConfig, TaskSetConfig
    from ludus.training.config.stages import OptimizerConfig, PreferenceConfig
    from ludus.training.data.batch import Batch
    from ludus.training.data.conversations import (
        read_conversations,
        read_labelled,
        read_pairs,
        trajectory_of,
    )
    from ludus.training.data.curricula import Curriculum, CurriculumConfig
    from ludus.training.data.micro_batches import MicroBatch, micro_batches
    from ludus.training.data.rollout_batch import RolloutBatch
    from ludus.training.data.tasks import TaskRecord, TaskSampler, TaskSet, items_of_step
    from ludus.training.evaluation.evaluate import Evaluation
    from ludus.training.loop import StepEvent, Trainer
    from ludus.training.models.loading import check_source, load_model
    from ludus.training.models.lora import add_adapter, save_adapter
    from ludus.training.models.references import adapter_reference
    from ludus.training.models.scratch import fit_tokenizer, scratch_model
    from ludus.training.optim.critic import Critic
    from ludus.training.optim.learner import Learner, frozen
    from ludus.training.optim.logprobs import action_logprobs, logprobs_of
    from ludus.training.optim.policy_update import policy_rows, policy_update
    from ludus.training.preflight import check_parts
    from ludus.training.run_context import RunContext, build_run_context
    from ludus.training.stages.sft import sft_step
    from ludus.training.task_sets import build_rollout, build_task_sets, close_task_sets, play_expert

__all__ = [
    "Batch",
    "BrokenConfig",
    "Critic",
    "CriticConfig",
    "Curriculum",
    "CurriculumConfig",
    "Evaluation",
    "Learner",
    "LoraConfig",
    "MicroBatch",
    "ModelConfig",
    "OptimizerConfig",
    "Parts",
    "PreferenceConfig",
    "RLConfig",
    "Recipe",
    "Result",
    "RolloutBatch",
    "RolloutSettings",
    "RunContext",
    "RunProgress",
    "ScratchConfig",
    "StepEvent",
    "TaskRecord",
    "TaskSampler",
    "TaskSet",
    "TaskSetConfig",
    "TaskSetSpec",
    "Trainer",
    "action_logprobs",
    "adapter_reference",
    "add_adapter",
    "build_rollout",
    "build_run_context",
    "build_task_sets",
    "check_parts",
    "check_source",
    "close_task_sets",
    "evaluate",
    "fit_tokenizer",
    "frozen",
    "items_of_step",
    "load_model",
    "load_parts",
    "load_recipe",
    "logprobs_of",
    "micro_batches",
    "play_expert",
    "policy_rows",
    "policy_update",
    "read_conversations",
    "read_labelled",
    "read_pairs",
    "rollout",
    "save_adapter",
    "save_model",
    "scratch_model",
    "sft_step",
    "task_set_specs",
    "train",
    "train_async",
    "trajectory_of",
]

__getattr__, __dir__ = lazy_exports(__name__)
