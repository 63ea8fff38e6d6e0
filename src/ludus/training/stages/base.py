"""A stage of a run: a number of steps, each of which either happens whole or not at all."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from ludus.core.failures import ConfigError, LudusError, failed_episodes_text
from ludus.core.messages import Json
from ludus.core.random import key
from ludus.core.trajectory import Group, Trajectory
from ludus.model import context_limit, vocabulary_size
from ludus.observe import atomic_directory
from ludus.training.checkpoint import save_state
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.training.config.stages import (
    BaseStageConfig,
    EvaluationStageConfig,
    PreferenceConfig,
    SFTConfig,
)
from ludus.training.data.batch import Batch
from ludus.training.models.lora import is_adapted
from ludus.training.models.sharded import ModelSource
from ludus.training.ranks.steps import StagePlan, StageTrainer, StepSettings
from ludus.training.run_context import RunContext

log = logging.getLogger(__name__)

C = TypeVar("C", bound=BaseStageConfig)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step."""

    metrics: dict[str, float]
    groups: Sequence[Group] = field(default_factory=list)
    """The episodes that were played for it."""
    split: str = "train"
    """The split of the episodes: train or eval."""
    notes: Sequence[Json] = ()
    """Notes that are recorded on each group: its task set, and its ordinal where it has one."""


class Stage(Generic[C]):
    """One part of a run. The trainer counts its steps, writes down what they show, and saves between them."""

    def __init__(self, context: RunContext, folder: Path, config: C) -> None:
        self.context = context
        self.folder = folder
        """A place in the run's folder for what outlives checkpoints, such as a reference model."""
        self.config = config
        self.phase = context.recipe.stage_title(int(folder.name)).removeprefix("the ")
        """Name of the stage on a progress bar."""
        self.steps = config.total_steps
        self.seed = _seed(context.recipe, int(folder.name))
        """Decides this stage's draws; two stages must not draw alike."""
        self.is_resumed = False
        """Whether it goes on from a checkpoint of its own."""
        self.is_half_updated = False
        """Whether a step changed some weights and did not get to its end: nothing to go on from."""

    @classmethod
    def check_parts(cls, config: C, where: str, recipe: Recipe, parts: Parts) -> None:
        """Raise a `ConfigError` for what the stage lacks, before a model is loaded. `where` names its table."""

    @classmethod
    async def check_data(cls, context: RunContext, config: C) -> None:
        """Read what the stage will be given, to find out before the first step what is wrong with it."""

    async def begin(self) -> None:
        """Get ready for the first step, or for the one after a checkpoint."""

    async def advance(self, number: int) -> StepResult:
        """Do step `number`, counted from 0.

        Nothing may be awaited after the weights have changed, so that a cancelled run stops before or after an
        update and never within it.
        """
        raise NotImplementedError

    @contextmanager
    def updating_weights(self) -> Iterator[None]:
        """Context of a step's updates. After an error inside, the half updated weights are not saved."""
        self.is_half_updated = True
        yield
        self.is_half_updated = False

    def open_trainer(self, total: int, temperature: float = 1.0) -> None:
        """Make, on all ranks, what changes the weights; `total` optimizer steps are planned."""
        lora = self.context.recipe.model.lora
        bare = lora is not None and lora.reference == "base"
        plan = StagePlan(self.config, total, self.seed, temperature, bare)
        self.context.ranks.perform("open_stage", plan)

    @property
    def trainer(self) -> StageTrainer[C]:
        """This rank's part of it."""
        return self.context.ranks.rank0.opened

    def train_step(self, rows: Any, settings: StepSettings) -> dict[str, float]:
        """Change the weights on all ranks; the engine's model has them then."""
        found: dict[str, float] = self.context.ranks.perform("train_step", rows, settings)
        return found

    def keep_start(self) -> None:
        """Write down the weights that the stage begins with: a resumed run has only later ones."""
        is_new = not self.folder.exists()
        if is_new and self.is_resumed:
            raise ConfigError(
                f"{self.folder} is gone, which held the weights that this stage began with: put it back, or "
                "begin a new run whose model is the last checkpoint's folder"
            )
        if is_new:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with atomic_directory(self.folder) as temporary:
                self.context.save_policy(temporary)

    def start_source(self) -> ModelSource | None:
        """Where all weights of the start are; None where an adapter is all that there is of it."""
        return None if is_adapted(self.context.policy) else self.context.source(str(self.folder))

    def save_trainer(self, folder: Path, state: Json | None = None) -> None:
        """Write the trainer's state, and what else of the stage can be written as JSON."""
        if state is not None:
            save_state(folder, state)
        self.context.ranks.perform("save_stage", folder)

    def load_trainer(self, folder: Path) -> None:
        """Put the trainer where a checkpoint left it."""
        self.context.ranks.perform("load_stage", folder)

    async def sync_engine(self) -> None:
        """After a step has been written down: let the engine go on with the new weights."""
        if self.config.learns:
            await self.context.sync_engine(later=not self.config.draws_tasks)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Context of an evaluation: the stage's own requests wait before the engine."""
        yield

    async def end(self) -> None:
        """Stop what is still being played. May be called twice; `save` may follow."""

    def save(self, folder: Path) -> None:
        """Write into a checkpoint what going on needs, apart from the weights."""

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint that `save` wrote; called after `begin`."""


def _seed(recipe: Recipe, number: int) -> int:
    """The run's own seed for the first stage that plays, and one of its own for each later one."""
    is_first = not any(stage.draws_tasks for stage in recipe.stages[:number])
    return recipe.seed if is_first else key(recipe.seed, "stage", number)


class EvaluationStage(Stage[EvaluationStageConfig]):
    """Play the held-out tasks several times, and write down how often it goes well."""

    @classmethod
    def check_parts(
        cls, config: EvaluationStageConfig, where: str, recipe: Recipe, parts: Parts
    ) -> None:
        if not (parts.held_out or any(one.evaluation for one in recipe.sets)):
            raise ConfigError(
                f'{where}, of kind "eval", has nothing to measure on: set tasks.evaluation, or pass held_out='
            )

    async def advance(self, number: int) -> StepResult:
        config = self.config
        measured = await self.context.measure(
            attempts=config.attempts,
            sampling=config.sampling,
            pass_at=config.pass_at,
            with_pass=True,
        )
        check_failures(measured.groups, self.context.recipe.max_failures)
        return StepResult(measured.metrics, measured.groups, split="eval")


def check_readable(trajectories: Sequence[Trajectory], model: nn.Module, what: str) -> None:
    """Refuse episodes that the model cannot read; `what` is what one of them is called."""
    limit, vocabulary = context_limit(model), vocabulary_size(model)
    for number, trajectory in enumerate(trajectories, start=1):
        batch = Batch.of([trajectory])
        longest, highest = max(batch.lengths, default=0), max(batch.tokens_T.tolist(), default=0)
        if limit is not None and longest > limit:
            raise ConfigError(
                f"{what} {number} has {longest} tokens, and the model can look at {limit}: shorten it or leave "
                "it out, or use a model with a longer context"
            )
        if highest >= vocabulary:
            raise ConfigError(
                f"{what} {number} holds the token {highest}, and the model has {vocabulary}: is the tokenizer "
                "another model's, or were the embeddings not resized?"
            )


def warn_of_large_batch(
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


def check_failures(groups: Sequence[Group], max_failures: float, *, scored: bool = True) -> None:
    """Raise when a larger share of the episodes failed through our fault, or (`scored`) none was scored."""
    failures = [t.failure for g in groups for t in g.trajectories if t.failure is not None]
    played = sum(len(group.trajectories) for group in groups)
    if scored and played and not failures and not any(group.trainable for group in groups):
        raise ConfigError(
            f"none of {played} episodes was scored: every reward returned None. Return a number for at "
            "least some of them"
        )
    if played and len(failures) / played > max_failures:
        raise LudusError(
            failed_episodes_text(
                len(failures), played, f", more than max_failures = {max_failures:g} allows", failures
            )
        )


def timing_metrics(groups: Sequence[Group], playing: float, training: float) -> dict[str, float]:
    """Shares of the step. While playing, a phase's share is its share of the episodes' time."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    total = sum(t.seconds.get("total", 0.0) for t in trajectories) or 1.0
    step = playing + training
    names = {"generation": "generate", "tools": "tools", "rewards": "rewards"}
    shares = {
        f"time_share/{name}": playing
        / step
        * sum(t.seconds.get(phase, 0.0) for t in trajectories)
        / total
        for name, phase in names.items()
    }
    said = sum(len(s.tokens) for t in trajectories for s in t.own_segments if s.logprobs is not None)
    return shares | {
        "time_share/training": training / step,
        "tokens_per_second": said / step,
        "episodes_per_second": len(trajectories) / step,
        "step_seconds": step,
    }
