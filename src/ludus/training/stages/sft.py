"""Supervised fine-tuning (SFT): on demonstrations, and on one's own best episodes (rejection sampling)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ludus.algos import by_token
from ludus.core.failures import ConfigError
from ludus.core.random import key, shuffled
from ludus.core.trajectory import Group, Trajectory
from ludus.observe import (
    keep_images,
    read_trajectories,
    rollout_metrics,
    with_images,
    write_trajectories,
)
from ludus.training.checkpoint import load_state
from ludus.training.config.parts import Parts, demonstrations_of, errors_at, has_own_sets
from ludus.training.config.recipe import Recipe
from ludus.training.config.rl import RolloutSettings
from ludus.training.config.stages import RejectionConfig, SFTConfig
from ludus.training.controller import step_by_step
from ludus.training.data.batch import Batch
from ludus.training.data.conversations import read_conversations, unknown_calls
from ludus.training.data.micro_batches import MicroBatch
from ludus.training.data.tasks import items_of_step
from ludus.training.optim.learner import Learner, Metrics
from ludus.training.optim.logprobs import logprobs_of
from ludus.training.ranks.steps import StageTrainer, StepSettings
from ludus.training.run_context import RunContext
from ludus.training.stages.base import (
    Stage,
    StepResult,
    check_failures,
    check_readable,
    warn_of_large_batch,
)
from ludus.training.task_sets import tool_specs

log = logging.getLogger(__name__)


class SFTStage(Stage[SFTConfig]):
    """Learn to say what was said in the demonstrations."""

    def __init__(self, context: RunContext, folder: Path, config: SFTConfig) -> None:
        super().__init__(context, folder, config)
        self._demonstrations: list[Trajectory] = []
        self._held_out: list[Trajectory] = []
        self.open_trainer(config.steps)

    @classmethod
    def check_parts(cls, config: SFTConfig, where: str, recipe: Recipe, parts: Parts) -> None:
        with errors_at(f"{where}.demonstrations"):
            shown = demonstrations_of(config, recipe, parts)
        if isinstance(config.held_out, str):
            with errors_at(f"{where}.held_out"):
                read_conversations(config.held_out, config.columns)
        if shown is None or (not callable(shown) and not shown):
            raise ConfigError(
                f'{where} has no demonstrations to imitate: set {where}.demonstrations to "module:function" '
                "or a file, or pass demonstrations="
            )

    @classmethod
    async def check_data(cls, context: RunContext, config: SFTConfig) -> None:
        await load_held_out(context, config)
        if has_expert(context, config):  # plays each task once, as far as they are needed
            played = sum(len(one.tasks) for one in context.task_sets)
            found = min(played, config.demonstrations_needed)
        else:
            found = len(await load_demonstrations(context, config))
        warn_of_large_batch(context, config, found - config.held_out_count(found), "demonstrations")

    async def begin(self) -> None:
        config, seed = self.config, self.context.recipe.seed
        shown = await load_demonstrations(self.context, config)
        order = shuffled(len(shown), key(seed, "held out"))
        kept_out = set(order[: config.held_out_count(len(shown))])
        self._demonstrations = [one for place, one in enumerate(shown) if place not in kept_out]
        self._held_out = [shown[place] for place in sorted(kept_out)]
        self._held_out += await load_held_out(self.context, config)
        if not (has_expert(self.context, self.config) or has_own_sets(self.context.recipe)):
            await self._note_unknown_tools()

    async def _note_unknown_tools(self) -> None:
        """Warn of demonstrations that call tools which their prompts do not describe."""
        shown = demonstrations_of(self.config, self.context.recipe, self.context.parts)
        known = await tool_specs(self.context.rollout)
        if unknown := sorted({name for one in shown for name in unknown_calls(one, known)}):
            log.warning(
                "demonstrations call tools that neither their rows nor this run have: %s",
                ", ".join(unknown)[:200],
            )

    async def advance(self, number: int) -> StepResult:
        started = time.perf_counter()
        seed = key(self.context.recipe.seed, "warm start")
        batch = items_of_step(self._demonstrations, number, self.config.batch, seed)
        with self.updating_weights():
            metrics = self.train_step(Batch.of(batch), StepSettings(number))
        if self._held_out and self._is_due(number + 1):
            metrics["held_out_loss"] = self.context.ranks.perform("measure", Batch.of(self._held_out))
        return StepResult({**metrics, "step_seconds": time.perf_counter() - started})

    def _is_due(self, done: int) -> bool:
        """After the first step, every so many as evaluations come, and after the last."""
        every = self.context.recipe.evaluation.every
        return done in (1, self.steps) or bool(every and done % every == 0)

    def save(self, folder: Path) -> None:
        self.save_trainer(folder)

    def load(self, folder: Path) -> None:
        self.load_trainer(folder)


class SFTTrainer(StageTrainer[Any]):
    """Trainer of supervised fine-tuning, for episodes of any origin."""

    def learn(self, rows: Batch, settings: StepSettings) -> dict[str, float]:
        return sft_step(self.learner, rows, settings.number)

    def measure(self, rows: Batch) -> float:
        return loss_on(self.learner, rows)


def sft_step(learner: Learner, batch: Batch, at: int | None = None) -> dict[str, float]:
    """One step of supervised fine-tuning on the actions of these rows; `at` is its place in the plan."""
    weights_T = by_token(batch.trajectory_T, batch.action_T)
    return learner.step_on(replace(batch, weights_T=weights_T), _negative_log_likelihood, at=at)


def _negative_log_likelihood(
    logprobs_A: Tensor, entropy_A: Tensor, batch: MicroBatch
) -> tuple[Tensor, Metrics]:
    return -logprobs_A, {}


def loss_on(learner: Learner, batch: Batch) -> float:
    """The mean of -log p over what was said in these rows, without learning from them."""
    budget, share = learner.config.micro_batch_tokens, learner.config.share_prefixes
    found_T = logprobs_of(learner.model, batch, 1.0, budget, share=share)
    return -float(found_T[batch.action_T].double().mean())


async def load_demonstrations(context: RunContext, config: SFTConfig) -> list[Trajectory]:
    """The trajectories to imitate."""
    source = demonstrations_of(config, context.recipe, context.parts)
    shown = await context.demonstrations(source, config.demonstrations_needed)
    if not shown:
        raise ConfigError("there are no demonstrations to imitate: set demonstrations, or pass them")
    if isinstance(config.held_out, float) and len(shown) < 2:
        raise ConfigError("held_out takes a share of the demonstrations, and there is only one")
    check_readable(shown, context.policy, "demonstration")
    return shown


async def load_held_out(context: RunContext, config: SFTConfig) -> list[Trajectory]:
    """The conversations of their own that a stage measures its loss on; none where it names none."""
    if not isinstance(config.held_out, str):
        return []
    shown = await context.demonstrations(read_conversations(config.held_out, config.columns))
    check_readable(shown, context.policy, "held-out conversation")
    return shown


def has_expert(context: RunContext, config: SFTConfig) -> bool:
    """Whether an expert plays the demonstrations, which takes its time and is left for the stage itself."""
    return callable(demonstrations_of(config, context.recipe, context.parts))


_KEPT = "kept.parquet"


class RejectionStage(Stage[RejectionConfig]):
    """Rejection sampling: imitate one's own best episodes. With several rounds, it is AgentEvol's iteration.

    Xi et al., "AgentGym: Evolving Large Language Model-based Agents across Diverse Environments", 2024,
    arXiv:2406.04151.
    """

    def __init__(self, context: RunContext, folder: Path, config: RejectionConfig) -> None:
        super().__init__(context, folder, config)
        # its schedule runs over all rounds, or over one where each begins anew
        self.open_trainer(config.steps if config.restart else self.steps)
        exploring = RolloutSettings(config.tasks, config.attempts)
        self._rollouts = step_by_step(context.task_sets, exploring, self.seed)
        self._kept: list[Trajectory] = []
        self._shown: list[Trajectory] = []
        """Demonstrations that are imitated beside them."""
        self._found_any = False
        """Whether any round so far had something to imitate."""

    async def advance(self, number: int) -> StepResult:
        started = time.perf_counter()
        round_number, place = divmod(number, self.config.steps)
        groups: Sequence[Group] = []
        metrics: dict[str, float] = {}
        if place == 0:
            groups = await self._explore(round_number)
            metrics = rollout_metrics(groups) | {"kept": len(self._kept)}
        if imitated := [*self._kept, *self._shown]:
            seed = key(self.seed, "rejection", round_number)
            batch = items_of_step(imitated, place, min(self.config.batch, len(imitated)), seed)
            with self.updating_weights():
                if place == 0 and self.config.restart:
                    self.context.ranks.perform("restart", self.start_source(), self.folder)
                at = place if self.config.restart else number
                metrics |= self.train_step(Batch.of(batch), StepSettings(at))
        return StepResult({**metrics, "step_seconds": time.perf_counter() - started}, groups)

    @classmethod
    def check_parts(cls, config: RejectionConfig, where: str, recipe: Recipe, parts: Parts) -> None:
        if config.demonstrations is not None:
            with errors_at(f"{where}.demonstrations"):
                read_conversations(config.demonstrations)

    async def begin(self) -> None:
        if self.config.demonstrations is not None:
            shown = read_conversations(self.config.demonstrations)
            self._shown = await self.context.demonstrations(shown)
            check_readable(self._shown, self.context.policy, "demonstration")
        if self.config.restart:
            self.keep_start()

    async def _explore(self, round_number: int) -> list[Group]:
        batch = await self._rollouts.next_batch()
        played = batch.played
        check_failures(played.groups, self.context.recipe.max_failures)
        await self.context.pause_sampling()
        self._kept = [t for group in played.groups for t in chosen(group, self.config)]
        self._found_any |= bool(self._kept)
        if not (self._kept or self._shown):
            self._note_empty(round_number)
        self._rollouts.trained(batch)  # nothing is awaited from here to the end of the step
        return played.groups

    def _note_empty(self, round_number: int) -> None:
        """A round without anything to imitate leaves the weights as they are; all of them are a mistake."""
        config = self.config
        if round_number + 1 == config.rounds and not self._found_any:
            raise ConfigError(
                f"no episode of {config.rounds} round(s) reached the reward {config.threshold:g}, so there "
                "was nothing to imitate: lower the threshold, raise attempts or tasks, or start from a better "
                "model"
            )
        log.warning(
            "no episode of round %d reached the reward %g: nothing is learned in it",
            round_number + 1,
            config.threshold,
        )

    def save(self, folder: Path) -> None:
        state = {"rollouts": self._rollouts.save(folder), "found_any": self._found_any}
        self.save_trainer(folder, state)
        write_trajectories(folder / _KEPT, self._kept)
        keep_images(folder, self._kept)

    def load(self, folder: Path) -> None:
        self.load_trainer(folder)
        state = load_state(folder)
        self._rollouts.load(folder, state["rollouts"])
        self._found_any = state["found_any"]
        self._kept = with_images(read_trajectories(folder / _KEPT), folder / _KEPT)


def chosen(group: Group, config: RejectionConfig) -> list[Trajectory]:
    """The episodes of a group that are imitated: the best, and of equal ones the shorter."""
    good = [t for t in group.trainable if t.reward is not None and t.reward >= config.threshold]
    return sorted(good, key=lambda t: (-(t.reward or 0.0), t.turns, t.attempt))[: config.keep]
