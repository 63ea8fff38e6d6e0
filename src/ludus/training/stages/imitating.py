"""Supervised learning on demonstrations."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from ludus.core.random import key, shuffled
from ludus.core.trajectory import Trajectory
from ludus.training.batches import items_of_step
from ludus.training.checkpoint import load_learner, save_learner
from ludus.training.learner import Learner
from ludus.training.logprobs import logprobs_of
from ludus.training.rows import flags, rows_of
from ludus.training.settings import ImitationConfig, held_out_count
from ludus.training.stages.given import given_demonstrations, given_held_out, is_played
from ludus.training.stages.stage import Stage, Step
from ludus.training.updates import imitate
from ludus.training.workshop import Workshop, tool_specs

log = logging.getLogger(__name__)


class Imitation(Stage):
    """Learn to say what was said in the demonstrations."""

    phase = "warm start"
    prefix = "sft"

    def __init__(self, workshop: Workshop, folder: Path, config: ImitationConfig) -> None:
        super().__init__(workshop, folder, config.steps)
        self._config = config
        self._demonstrations: list[Trajectory] = []
        self._held_out: list[Trajectory] = []
        self._learner = Learner(workshop.model, config.optimizer, config.steps, seed=self.seed)

    async def begin(self) -> None:
        config, seed = self._config, self.workshop.recipe.seed
        shown = await given_demonstrations(self.workshop, config)
        order = shuffled(len(shown), key(seed, "held out"))
        kept_out = set(order[: held_out_count(config, len(shown))])
        self._demonstrations = [one for place, one in enumerate(shown) if place not in kept_out]
        self._held_out = [shown[place] for place in sorted(kept_out)]
        self._held_out += await given_held_out(self.workshop, config)
        if not (is_played(self.workshop, self._config) or self.workshop.recipe.task_sets):
            await self._note_unknown_tools()

    async def _note_unknown_tools(self) -> None:
        """What others have written down may have had other tools than there are in this run."""
        messages = [message for shown in self._demonstrations for message in shown.messages]
        called = {call.name for message in messages for call in message.tool_calls}
        if not called:
            return
        known = {spec.name for spec in await tool_specs(self.workshop.rollout, self.workshop.parts)}
        if unknown := sorted(called - known):
            log.warning(
                "demonstrations call tools that this run does not have: %s", ", ".join(unknown)[:200]
            )

    async def advance(self, number: int) -> Step:
        started = time.perf_counter()
        seed = key(self.workshop.recipe.seed, "warm start")
        batch = items_of_step(self._demonstrations, number, self._config.batch, seed)
        with self.change():
            metrics = imitate(self._learner, batch)
        if self._held_out and self._is_due(number + 1):
            metrics["held_out_loss"] = loss_on(self._learner, self._held_out)
        return Step({**metrics, "step_seconds": time.perf_counter() - started})

    def _is_due(self, done: int) -> bool:
        """After the first step, every so many as evaluations come, and after the last."""
        every = self.workshop.recipe.evaluation.every
        return done in (1, self.steps) or bool(every and done % every == 0)

    def save(self, folder: Path) -> None:
        save_learner(folder, self._learner)

    def load(self, folder: Path) -> None:
        load_learner(folder, self._learner)


def loss_on(learner: Learner, trajectories: Sequence[Trajectory]) -> float:
    """The mean of -log p over what was said in these episodes, without learning from them."""
    rows = rows_of(trajectories)
    said_T = flags(row.action_mask for row in rows)
    budget = learner.config.micro_batch_tokens
    return -float(logprobs_of(learner.model, rows, said_T, 1.0, budget)[said_T].double().mean())
