"""On-policy distillation: the student plays, and a teacher scores every token that it said.

    reverse KL of a token   k = log p(y) - log q(y)      p the student as it sampled, q the teacher
    loss of a token         k * ratio                    ratio = p_now(y) / p(y), which is 1 in the first pass

so a token's advantage is -k, its own alone (a discount of 0), averaged over all action tokens. Its expectation
is the gradient of KL(student || teacher) at the states that the student visits: it makes the student seek the
teacher's modes where it gets to by itself, which imitating the teacher's own episodes does not. Observations
are context for both. Rewards play no part; where a recipe has some, they are logged.

Gu et al., "MiniLLM: Knowledge Distillation of Large Language Models", 2023, arXiv:2306.08543. Agarwal et al.,
"On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes" (GKD), 2023,
arXiv:2306.13649. Lu et al., "On-Policy Distillation", Thinking Machines Lab, 2025.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from ludus.algos import by_token
from ludus.chat.tokenizers import HFTokenizer
from ludus.core.failures import ConfigError
from ludus.core.trajectory import Trajectory, is_lost
from ludus.observe import rollout_metrics
from ludus.training.checkpoint import load_state
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.training.config.rl import RolloutSettings
from ludus.training.config.run import ModelConfig
from ludus.training.config.stages import DistillationConfig
from ludus.training.controller import step_by_step
from ludus.training.data.batch import Batch
from ludus.training.data.micro_batches import MicroBatch
from ludus.training.models.loading import check_source, tokenizer_of
from ludus.training.models.sharded import ModelSource
from ludus.training.optim.learner import Learner
from ludus.training.ranks.steps import StageTrainer, StepSettings
from ludus.training.run_context import RunContext
from ludus.training.stages.base import Stage, StepResult, check_failures, check_readable, timing_metrics


class DistillationStage(Stage[DistillationConfig]):
    """Become like a teacher where one gets to by oneself."""

    def __init__(self, context: RunContext, folder: Path, config: DistillationConfig) -> None:
        super().__init__(context, folder, config)
        self.open_trainer(config.steps, context.recipe.sampling.temperature)
        playing = RolloutSettings(config.tasks, config.attempts)
        self._rollouts = step_by_step(context.task_sets, playing, self.seed)

    @classmethod
    def check_parts(cls, config: DistillationConfig, where: str, recipe: Recipe, parts: Parts) -> None:
        try:
            check_source(ModelConfig(name=config.teacher))
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.name", f"{where}.teacher")) from None

    @classmethod
    async def check_data(cls, context: RunContext, config: DistillationConfig) -> None:
        check_teacher(context, config)

    async def begin(self) -> None:
        check_teacher(self.context, self.config)
        source = self.context.source(self.config.teacher)
        self.context.ranks.perform("prepare_stage", source, self.folder)

    async def advance(self, number: int) -> StepResult:
        started = time.perf_counter()
        batch = await self._rollouts.next_batch()
        played = batch.played
        check_failures(played.groups, self.context.recipe.max_failures, scored=False)
        said = [t for group in played.groups for t in group.trajectories if _is_whole(t)]
        check_readable(
            said, cast("DistillationTrainer", self.trainer).teacher, "for the teacher, episode"
        )
        await self.context.pause_sampling()
        ready = time.perf_counter()
        with self.updating_weights():
            metrics = self.train_step(Batch.of(said), StepSettings(number))
        self._rollouts.trained(batch)
        metrics |= rollout_metrics(played.groups)
        metrics |= timing_metrics(played.groups, ready - started, time.perf_counter() - ready)
        return StepResult(metrics, played.groups)

    def save(self, folder: Path) -> None:
        state = {"rollouts": self._rollouts.save(folder)}
        self.save_trainer(folder, state)

    def load(self, folder: Path) -> None:
        self.load_trainer(folder)
        self._rollouts.load(folder, load_state(folder)["rollouts"])


class DistillationTrainer(StageTrainer[DistillationConfig]):
    """Holds the teacher."""

    teacher: nn.Module

    def prepare(self, source: ModelSource | None, folder: Path) -> None:
        assert source is not None
        self.teacher = self.rank.load_frozen(source)

    def learn(self, rows: Batch, settings: StepSettings) -> dict[str, float]:
        return distill(self.learner, rows, self.teacher, settings.number)


def distill(
    learner: Learner, batch: Batch, teacher: nn.Module, at: int | None = None
) -> dict[str, float]:
    """One step on what the student said; `reverse_kl` is the mean of log p - log q over its tokens."""
    if not len(batch):
        return {}
    teacher_T = learner.logprobs(batch, teacher)
    divergence_T = torch.where(batch.action_T, batch.rollout_logprobs_T - teacher_T, 0.0)
    weights_T = by_token(batch.trajectory_T, batch.action_T)

    def objective(
        logprobs_A: Tensor, entropy_A: Tensor, part: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_A = (logprobs_A - part.old_logprobs_A).clamp(max=20).exp()
        return -ratio_A * part.advantages_A, {"reverse_kl": -part.advantages_A}

    batch = replace(batch, advantages_T=-divergence_T, weights_T=weights_T)
    return learner.step_on(batch, objective, at=at)


def check_teacher(context: RunContext, config: DistillationConfig) -> None:
    """Refuse a teacher to which the student's tokens mean something else; it may have further ones."""
    try:
        trust = context.recipe.model.trust_remote_code
        theirs = tokenizer_of(ModelConfig(name=config.teacher, trust_remote_code=trust))
    except ConfigError as error:
        raise ConfigError(f"the teacher: {error}") from error
    compare_tokenizers(context.tokenizer, theirs, config.teacher)


def compare_tokenizers(student: HFTokenizer, teacher: HFTokenizer, name: str) -> None:
    own, theirs = student.inner.get_vocab(), teacher.inner.get_vocab()
    other = [token for token, number in own.items() if theirs.get(token) != number]
    if other:
        raise ConfigError(
            f"teacher = {name!r} has another tokenizer than the student: {len(other)} of {len(own)} tokens are "
            f"others or have other numbers, such as {other[0]!r}. The teacher scores the student's tokens, so "
            "it must be a model of the same family"
        )


def _is_whole(trajectory: Trajectory) -> bool:
    """Whether the episode was played to its end and has an action. It need not be scored."""
    return not is_lost(trajectory) and any(action.tokens for action in trajectory.actions)
