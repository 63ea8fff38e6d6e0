"""Reinforcement learning: play, score, update.

A step takes the next batch of finished groups (`controller`). With `staleness = 0` its episodes are played
then, and the update blocks the event loop. Above 0 episodes are played all the time: the engine is paused for
the update alone, which runs in a thread so that tools and their deadlines go on. Requests in flight then
go on with the new weights. Engines in other processes are not paused: they sample during the update, too. Once
an update has begun, a cancelled run waits until the engine has its result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from torch import nn

from ludus.algos import Need, adapted_kl_coefficient
from ludus.core.failures import ConfigError
from ludus.core.trajectory import Group
from ludus.observe import rollout_metrics
from ludus.remote.threads import run_to_the_end
from ludus.rewards import Scorer
from ludus.rollouts.branching import check_forkable
from ludus.rollouts.recorder import asking_policy
from ludus.training.checkpoint import load_state
from ludus.training.config.parts import Parts, TaskSetSpec, task_set_specs
from ludus.training.config.recipe import Recipe
from ludus.training.config.rl import CriticConfig, RLConfig
from ludus.training.controller import NextBatch, RolloutController, step_by_step, within
from ludus.training.data.curricula import (
    DIFFICULTY,
    STRICTNESS,
    Curriculum,
    CurriculumFunction,
    function_of,
)
from ludus.training.data.rollout_batch import ReplayBuffer, RolloutBatch, code_versions
from ludus.training.data.tasks import difficulty_of, load_sampler
from ludus.training.ledger import Ledger
from ludus.training.models.lora import is_adapted
from ludus.training.models.references import load_synced, save_synced, sync_if_due
from ludus.training.models.sharded import ModelSource, hollow_model, shard_values
from ludus.training.optim.critic import Critic
from ludus.training.optim.policy_update import PolicyRows, algorithm_of, policy_rows, policy_update
from ludus.training.optim.sharding import ShardedModel
from ludus.training.player import GroupPlan, LocalPlayer
from ludus.training.ranks.steps import RankSteps, StagePlan, StageTrainer, StepSettings
from ludus.training.run_context import RunContext
from ludus.training.stages.base import Stage, StepResult, check_failures, timing_metrics


class RLStage(Stage[RLConfig]):
    """Learn from rewards."""

    def __init__(self, context: RunContext, folder: Path, config: RLConfig) -> None:
        super().__init__(context, folder, config)
        total = config.updates_before(config.steps)
        self.open_trainer(total, context.recipe.sampling.temperature)
        self._curriculum = curriculum_of(config)
        self._rollouts = self._controller() if context.recording is None else None
        """The controller that plays; None for a run that learns from a recording."""
        self._plays_on = config.staleness.steps > 0 and context.recording is None
        """Whether groups are played while others are trained on."""
        self._updated = time.perf_counter()
        """When the last step ended."""
        self._kl = config.kl.weight
        """The KL coefficient, which may adapt."""
        self._replay: ReplayBuffer | None = None
        """Groups of earlier steps that are trained on again."""

    @classmethod
    def check_parts(cls, config: RLConfig, where: str, recipe: Recipe, parts: Parts) -> None:
        if config.sampler is not None:
            load_sampler(config.sampler)
        if config.steps:
            check_curriculum(config, where, recipe, parts)

    @classmethod
    async def check_data(cls, context: RunContext, config: RLConfig) -> None:
        check_sync(context, config)
        for one in context.task_sets if config.tree is not None and config.steps else ():
            check_forkable(one.rollout.pools, one.rollout.tools)

    async def begin(self) -> None:
        config = self.config
        if config.replay_buffer is not None:
            sets = self.context.task_sets
            code = [await code_versions(one.rollout) for one in sets]
            self._replay = ReplayBuffer(config.replay_buffer, config.rollouts, sets, code, self.seed)
        if config.kl.weight > 0:
            self.keep_start()
        source = self.start_source() if config.kl.weight > 0 else None
        self.context.ranks.perform("prepare_stage", source, self.folder)

    def _controller(self) -> RolloutController:
        config, sets = self.config, self.context.task_sets
        if not config.staleness.steps:
            return step_by_step(sets, config.rollouts, self.seed, self._curriculum.values)
        total = config.steps * config.tasks
        return RolloutController(
            sets,
            config.rollouts,
            self.seed,
            Ledger(config.tasks, config.staleness.steps, config.staleness.window, total),
            LocalPlayer(sets, config.rollouts),
            self._curriculum.values,
            stall_seconds=config.staleness.stall_seconds,
        )

    async def advance(self, number: int) -> StepResult:
        started = time.perf_counter()
        if self._rollouts is None:
            played = self._recorded(number)
            self._check(played)
            return await self._train(number, played, started)
        batch = await self._rollouts.next_batch()
        self._check(batch.played)
        await self._end_rollouts(batch.played)
        if self._plays_on:
            return await run_to_the_end(self._train_async(number, batch, self._rollouts))
        result = await self._train(number, batch.played, started)
        self._rollouts.trained(batch)
        return result

    def _recorded(self, number: int) -> RolloutBatch:
        """The batch that the replayed run trained on in this step."""
        assert self.context.recording is not None
        _, start, _ = self.context.recipe.stage_spans[int(self.folder.name)]
        return self.context.recording.batch(
            start + number + 1, self.context.task_sets, self.config.rollouts
        )

    def _check(self, played: RolloutBatch) -> None:
        check_failures([*played.groups, *played.dropped], self.context.recipe.max_failures)

    async def _train(self, number: int, played: RolloutBatch, started: float) -> StepResult:
        """Pause the engine and update, all else waiting."""
        values = self._curriculum.values(number)
        await self.context.pause_sampling()
        ready = time.perf_counter()
        with self.updating_weights():
            metrics = self._learn_from(played, number)
        ended = time.perf_counter()
        metrics = self._measured(metrics, played, (ready - started, ended - ready))
        metrics |= {f"curriculum/{name}": value for name, value in values.items()}
        metrics["policy_version"] = self.context.engine.policy_version
        metrics |= self.context.engine.metrics()
        self._curriculum.observe(metrics)
        notes = [{"set": self.context.task_sets[one].name, "curriculum": values} for one in played.sets]
        return StepResult(metrics, () if self._rollouts is None else played.groups, notes=notes)

    async def _end_rollouts(self, played: RolloutBatch) -> None:
        """Let rewards change with the policy, while the engine can still be asked."""
        sets = self.context.task_sets
        scorers = {id(one.rollout.scorer): one.rollout for one in sets}
        for key, rollout in scorers.items():
            own = [
                group
                for group, number in zip(played.groups, played.sets, strict=True)
                if id(sets[number].rollout.scorer) == key
            ]
            with asking_policy(rollout.policy):
                await rollout.scorer.end_step(own)

    async def _train_async(
        self, number: int, batch: NextBatch, rollouts: RolloutController
    ) -> StepResult:
        """Update while the engine is paused, and let it go on; nothing of it is cut off."""
        engine, played, limit = self.context.engine, batch.played, self.config.staleness.stall_seconds
        version, ledger = engine.policy_version, rollouts.ledger
        counts = len(ledger.in_flight()), len(ledger.finished()) - len(batch.plans)
        ready = time.perf_counter()
        await within(limit, lambda: "the engine to pause", self.context.pause_sampling())
        with self.updating_weights():
            metrics = await asyncio.to_thread(self._learn_from, played, number)
            ended = time.perf_counter()
            await within(
                limit, lambda: "the engine to go on with new weights", self.context.sync_engine()
            )
        metrics = self._measured(metrics, played, (ready - self._updated, ended - ready))
        metrics |= lag_metrics(played.groups, version) | curriculum_metrics(batch.plans)
        metrics |= {
            "groups_in_flight": counts[0],
            "groups_finished": counts[1],
            "wait_seconds": batch.waited,
            "paused_seconds": time.perf_counter() - ready,
            "policy_version": version,
            **self.context.engine.metrics(),
        }
        self._updated = ended
        self._curriculum.observe(metrics)
        rollouts.trained(batch)
        return StepResult(metrics, played.groups, notes=rollouts.notes(batch))

    def _learn_from(self, played: RolloutBatch, number: int) -> dict[str, float]:
        """The update of step `number`; where nothing could be learned, it has no metrics."""
        version, batch = self.context.engine.policy_version, played
        if self._replay is not None:
            batch = self._replay.mixed(played, number, version)
            self._replay.add(played, version)
        rows = policy_rows(batch, self.config)
        metrics = self.train_step(rows, StepSettings(number, self._kl, version))
        return metrics | (batch.metrics if self._replay is not None else {})

    def _measured(
        self, metrics: dict[str, float], played: RolloutBatch, seconds: tuple[float, float]
    ) -> dict[str, float]:
        """The metrics of a step's update and episodes; `seconds` are those of playing and of training."""
        # over all that was played: what refills and resampling keep does not represent the policy
        everything = [*played.groups, *played.dropped]
        metrics |= rollout_metrics(everything) | played.metrics
        self._adapt(metrics)
        return metrics | timing_metrics(everything, *seconds)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        if self._rollouts is None or not self._plays_on:
            yield
            return
        await self._rollouts.hold()
        try:
            yield
        finally:
            self._rollouts.release()

    async def sync_engine(self) -> None:
        if not self._plays_on:
            await super().sync_engine()

    async def end(self) -> None:
        if self._rollouts is not None:
            await self._rollouts.close()

    def _adapt(self, metrics: dict[str, float]) -> None:
        """Find the next step's KL coefficient, and note the one that this step had."""
        if self.config.kl.weight > 0:
            metrics["kl_coefficient"] = self._kl
        config = self.config.kl.control
        if config is not None and "kl" in metrics:
            episodes = int(metrics["episodes_scored"])
            self._kl = adapted_kl_coefficient(
                self._kl, metrics["kl"], episodes, target=config.target, horizon=config.horizon
            )

    def save(self, folder: Path) -> None:
        state = {
            "rollouts": None if self._rollouts is None else self._rollouts.save(folder),
            "curriculum": self._curriculum.state_dict(),
            "kl": self._kl,
        }
        self.save_trainer(folder, state)
        if self._replay is not None:
            self._replay.save(folder)

    def load(self, folder: Path) -> None:
        self.load_trainer(folder)
        state = load_state(folder)
        if self._rollouts is not None:
            self._rollouts.load(folder, state["rollouts"])
        self._curriculum.load_state_dict(state["curriculum"])
        if self.config.kl.control is not None:
            self._kl = state["kl"]
        if self._replay is not None:
            self._replay.load(folder)


class RLTrainer(StageTrainer[RLConfig]):
    """Holds the reference and the critic, where the algorithm has them."""

    reference: nn.Module | None = None
    critic: Critic | None = None

    def __init__(self, rank: RankSteps, plan: StagePlan[RLConfig]) -> None:
        super().__init__(rank, plan)
        self.algorithm = algorithm_of(plan.config)

    def prepare(self, source: ModelSource | None, folder: Path) -> None:
        config, rank = self.config, self.rank
        if config.kl.weight > 0:
            self.reference = self.load_start(source, folder)
        if Need.CRITIC in self.algorithm.needs:
            settings = config.critic or CriticConfig()
            total = config.steps * config.updates * settings.passes
            values: nn.Module | None = None
            if isinstance(rank.policy, ShardedModel):
                assert rank.source is not None
                values = shard_values(
                    rank.policy, hollow_model(rank.source), own_trunk=settings.kind == "model"
                )
            self.critic = Critic(rank.policy, settings, total, self.plan.seed, values)

    def learn(self, rows: PolicyRows, settings: StepSettings) -> dict[str, float]:
        config, critic, step = self.config, self.critic, settings.number
        warming_up = critic is not None and critic.is_warming_up(step)
        metrics = policy_update(
            self.learner,
            rows,
            config,
            reference=self.reference,
            critic=critic,
            algorithm=self.algorithm,
            critic_only=warming_up,
            kl=settings.kl,
            step=step,
            version=settings.version,
        )
        if config.reference_sync is not None and self.reference is not None:
            sync_if_due(self.reference, self.rank.policy, config.reference_sync, step)
        # where nothing could be learned, the update has no metrics
        return {"no_signal": float(not warming_up)} | metrics

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.config.reference_sync is not None and self.reference is not None:
            save_synced(folder, self.reference)
        if self.critic is not None:
            self.critic.save(folder)

    def load(self, folder: Path) -> None:
        super().load(folder)
        if self.config.reference_sync is not None and self.reference is not None:
            load_synced(folder, self.reference)
        if self.critic is not None:
            self.critic.load(folder)


def check_sync(context: RunContext, config: RLConfig) -> None:
    """Refuse what a reference made of an adapter cannot do, before anything is played."""
    if config.reference_sync is None or not is_adapted(context.policy):
        return
    lora = context.recipe.model.lora
    if lora is not None and lora.reference == "base":
        raise ConfigError(
            'reference_sync lets the reference follow the policy, and model.lora.reference = "base" keeps it '
            'at the model without its adapter: leave out reference_sync, or set model.lora.reference = "start"'
        )
    if config.reference_sync.mixup_alpha != 1:
        raise ConfigError(
            f"reference_sync.mixup_alpha = {config.reference_sync.mixup_alpha:g}: a mixture of two adapters is "
            "no adapter of the same rank (their matrices are multiplied); set mixup_alpha = 1, which copies "
            "the policy's, or train all weights"
        )


def lag_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How far the policies that played these episodes are behind the one that is trained, which has
    `version`."""
    spans = [
        {span.version for action in trajectory.actions for span in action.versions}
        for group in groups
        for trajectory in group.trainable
    ]
    versions = [one for one in spans if one]
    if not versions:
        return {}
    lags = [version - min(one) for one in versions]
    return {
        "lag_mean": sum(lags) / len(lags),
        "lag_max": max(lags),
        "versions_per_episode": sum(map(len, versions)) / len(versions),
    }


def curriculum_metrics(plans: Sequence[GroupPlan]) -> dict[str, float]:
    """The mean of each curriculum's values, which were fixed when the groups were scheduled."""
    names = dict.fromkeys(name for plan in plans for name in plan.values)
    return {f"curriculum/{n}": sum(d.values[n] for d in plans) / len(plans) for n in names}


def curriculum_of(config: RLConfig) -> Curriculum | CurriculumFunction:
    function = function_of(config.curriculum)
    return Curriculum(config.curriculum) if function is None else CurriculumFunction(function)


def check_curriculum(stage: RLConfig, where: str, recipe: Recipe, parts: Parts) -> None:
    """What a curriculum moves must be there: rewards that can be strict, tasks that are easy enough."""
    moved: dict[str, tuple[str, Sequence[float]]] = {
        one.setting: (f"{where}.curriculum.{number}", one.values)
        for number, one in enumerate(stage.curriculum)
        if one.setting is not None
    }
    if function_of(stage.curriculum) is not None:
        first = curriculum_of(stage).values(0)
        moved = {name: (f"{where}.curriculum", (value,)) for name, value in first.items()}
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
