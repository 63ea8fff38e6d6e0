"""Supervised learning on demonstrations."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ludus.core.random import key
from ludus.core.trajectory import Trajectory
from ludus.training.batches import items_of_step
from ludus.training.checkpoint import load_learner, save_learner
from ludus.training.learner import Learner
from ludus.training.settings import ImitationConfig
from ludus.training.stages.given import given_demonstrations, is_played
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
        self._learner = Learner(workshop.model, config.optimizer, config.steps, seed=self.seed)

    async def begin(self) -> None:
        self._demonstrations = await given_demonstrations(self.workshop, self._config)
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
        return Step({**metrics, "step_seconds": time.perf_counter() - started})

    def save(self, folder: Path) -> None:
        save_learner(folder, self._learner)

    def load(self, folder: Path) -> None:
        load_learner(folder, self._learner)
