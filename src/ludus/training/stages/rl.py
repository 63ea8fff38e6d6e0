"""Reinforcement learning: play, score, update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ludus.algos import Need, adapted_kl_coefficient
from ludus.core.failures import ConfigError
from ludus.observe import rollout_metrics
from ludus.rewards import Scorer
from ludus.training.checkpoint import (
    check_sync,
    load_learner,
    load_reference_model,
    load_synced,
    save_learner,
    save_synced,
    sync_reference,
)
from ludus.training.config.parts import Parts, TaskSetSpec, task_set_specs
from ludus.training.config.recipe import Recipe
from ludus.training.config.rl import CriticConfig, RLConfig
from ludus.training.data.curriculum import DIFFICULTY, STRICTNESS, Curriculum
from ludus.training.data.task_sampler import difficulty_of
from ludus.training.optim.critic import Critic
from ludus.training.optim.learner import Learner
from ludus.training.optim.policy_update import algorithm_of, policy_update
from ludus.training.rollout_worker import RolloutWorker
from ludus.training.run_context import RunContext
from ludus.training.stages.base import Stage, StepResult, check_failures, timing_metrics


class RLStage(Stage[RLConfig]):
    """Learn from rewards."""

    def __init__(self, context: RunContext, folder: Path, config: RLConfig) -> None:
        super().__init__(context, folder, config)
        warm_up = config.critic.warmup_steps if config.critic is not None else 0
        total = max(0, config.steps - warm_up) * config.updates * config.epochs
        self._learner = Learner(
            context.model, config.optimizer, total, context.recipe.sampling.temperature, self.seed
        )
        self._worker = RolloutWorker(context.task_sets, config.rollouts, self.seed)
        self._curriculum = Curriculum(config.curriculum)
        self._kl = config.kl
        """The KL coefficient, which may adapt."""
        self._reference: nn.Module | None = None
        self._critic: Critic | None = None

    @classmethod
    def check_parts(cls, config: RLConfig, where: str, recipe: Recipe, parts: Parts) -> None:
        if config.steps:
            check_curriculum(config, where, recipe, parts)

    @classmethod
    async def check_data(cls, context: RunContext, config: RLConfig) -> None:
        check_sync(context, config)

    async def begin(self) -> None:
        config = self.config
        if config.kl > 0:
            self._reference = load_reference_model(self.context, self.folder, self.is_resumed)
        if Need.CRITIC in algorithm_of(config).needs:
            settings = config.critic or CriticConfig()
            total = config.steps * config.updates * settings.passes
            self._critic = Critic(self.context.model, settings, total, self.seed)

    async def advance(self, number: int) -> StepResult:
        started = time.perf_counter()
        values = self._curriculum.values(number)
        played = await self._worker.play(number, values)
        everything = [*played.groups, *played.dropped]
        check_failures(everything, self.context.recipe.max_failures)
        await self.context.engine.pause()
        ready = time.perf_counter()
        warming_up = self._critic is not None and self._critic.is_warming_up(number)
        with self.updating_weights():
            # where nothing could be learned, the update has no metrics
            metrics = {"no_signal": float(not warming_up)} | policy_update(
                self._learner,
                played,
                self.config,
                reference=self._reference,
                critic=self._critic,
                critic_only=warming_up,
                kl=self._kl,
            )
            self._sync(number)
        ended = time.perf_counter()
        # over all that was played: what refills and resampling leave is no picture of the policy
        metrics |= rollout_metrics(everything) | played.metrics
        self._adapt(metrics)
        metrics |= timing_metrics(everything, ready - started, ended - ready)
        metrics |= {f"curriculum/{name}": value for name, value in values.items()}
        metrics["policy_version"] = self.context.engine.policy_version
        self._curriculum.observe(metrics)
        return StepResult(metrics, played.groups)

    def _sync(self, number: int) -> None:
        """After step `number`, counted from 0: let the reference follow, if it is time to."""
        config = self.config.reference_sync
        if config is not None and self._reference is not None and (number + 1) % config.every == 0:
            sync_reference(self._reference, self.context.model, config.mixup_alpha)

    def _adapt(self, metrics: dict[str, float]) -> None:
        """Find the next step's KL coefficient, and note the one that this step had."""
        if self.config.kl > 0:
            metrics["kl_coefficient"] = self._kl
        config = self.config.kl_control
        if config is not None and "kl" in metrics:
            episodes = int(metrics["episodes_scored"])
            self._kl = adapted_kl_coefficient(
                self._kl, metrics["kl"], episodes, target=config.target, horizon=config.horizon
            )

    def save(self, folder: Path) -> None:
        state = {
            "player": self._worker.state_dict(),
            "curriculum": self._curriculum.state_dict(),
            "kl": self._kl,
        }
        save_learner(folder, self._learner, state)
        if self.config.reference_sync is not None and self._reference is not None:
            save_synced(folder, self._reference)
        if self._critic is not None:
            self._critic.save(folder)

    def load(self, folder: Path) -> None:
        state = load_learner(folder, self._learner)
        self._worker.load_state_dict(state["player"])
        self._curriculum.load_state_dict(state["curriculum"])
        if self.config.kl_control is not None:
            self._kl = state["kl"]
        if self.config.reference_sync is not None and self._reference is not None:
            load_synced(folder, self._reference)
        if self._critic is not None:
            self._critic.load(folder)


def check_curriculum(stage: RLConfig, where: str, recipe: Recipe, parts: Parts) -> None:
    """What a curriculum moves must be there: rewards that can be strict, tasks that are easy enough."""
    moved = {
        one.setting: (f"{where}.curriculum.{number}", one.values)
        for number, one in enumerate(stage.curriculum)
    }
    if not moved.keys() & {STRICTNESS, DIFFICULTY}:
        return
    plans = task_set_specs(recipe, parts)
    scorers = (Scorer(plan.parts.rewards, plan.parts.group_rewards) for plan in plans)
    if STRICTNESS in moved and not any(scorer.takes_strictness for scorer in scorers):
        raise ConfigError(
            f"{moved[STRICTNESS][0]} moves {STRICTNESS}, but no reward takes it: give one a keyword-only "
            "parameter `strictness` with a default"
        )
    if DIFFICULTY in moved:
        _check_difficulty(*moved[DIFFICULTY], plans)


def _check_difficulty(place: str, values: Sequence[float], plans: Sequence[TaskSetSpec]) -> None:
    easiest = {plan.name: min(map(difficulty_of, plan.parts.tasks), default=None) for plan in plans}
    if not any("difficulty" in task.metadata for plan in plans for task in plan.parts.tasks):
        raise ConfigError(
            f"{place} moves {DIFFICULTY}, but no task has a difficulty in its metadata: give it to the tasks, "
            "or leave out the curriculum"
        )
    for name, least in easiest.items():
        if least is not None and least > min(values):
            raise ConfigError(
                f"{place}: no task of the set {name!r} has a difficulty of at most {min(values):g}, to which "
                f"the curriculum sets {DIFFICULTY}; the easiest one has {least:g}"
            )
