"""Rejection sampling, and AgentEvol's iteration of it: explore, filter, imitate, repeat.

Xi et al., "AgentGym: Evolving Large Language Model-based Agents across Diverse Environments", 2024,
arXiv:2406.04151.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from ludus.core.failures import ConfigError
from ludus.core.random import key
from ludus.core.trajectory import Group, Trajectory
from ludus.observe import read_trajectories, rollout_metrics, write_trajectories
from ludus.training.batches import items_of_step
from ludus.training.checkpoint import load_learner, save_learner
from ludus.training.learner import Learner
from ludus.training.playing import Player
from ludus.training.settings import RejectionConfig, RLConfig
from ludus.training.stages.checking import check_failures
from ludus.training.stages.reference import load_reference
from ludus.training.stages.stage import Stage, Step
from ludus.training.updates import imitate
from ludus.training.workshop import Workshop

log = logging.getLogger(__name__)

_KEPT, _STATE = "kept.parquet", "rejection.json"


class Rejection(Stage):
    """Imitate one's own best episodes."""

    phase = "rejection sampling"
    prefix = "rejection"

    def __init__(self, workshop: Workshop, folder: Path, config: RejectionConfig) -> None:
        super().__init__(workshop, folder, config.rounds * config.steps)
        self._config = config
        self._learner = self._new_learner()
        exploring = RLConfig(algorithm="reinforce", tasks=config.tasks, attempts=config.attempts)
        self._player = Player(workshop.task_sets, exploring, self.seed)
        self._kept: list[Trajectory] = []
        self._found_any = False
        """Whether any round so far had something to imitate."""

    async def advance(self, number: int) -> Step:
        started = time.perf_counter()
        round_number, place = divmod(number, self._config.steps)
        groups: Sequence[Group] = []
        metrics: dict[str, float] = {}
        if place == 0:
            groups = await self._explore(round_number)
            metrics = rollout_metrics(groups) | {"kept": len(self._kept)}
        if self._kept:
            seed = key(self.seed, "rejection", round_number)
            batch = items_of_step(self._kept, place, min(self._config.batch, len(self._kept)), seed)
            with self.change():
                if place == 0 and self._config.restart:
                    self._return_to_start()
                metrics |= imitate(self._learner, batch)
        return Step({**metrics, "step_seconds": time.perf_counter() - started}, groups)

    async def begin(self) -> None:
        if self._config.restart:
            load_reference(self.workshop, self.folder, self.is_resumed)  # written down, to return to

    async def _explore(self, round_number: int) -> list[Group]:
        played = await self._player.play(round_number, {})
        check_failures(played.groups, self._config.max_failures)
        await self.workshop.engine.pause()
        self._kept = [t for group in played.groups for t in chosen(group, self._config)]
        self._found_any |= bool(self._kept)
        if not self._kept:
            self._note_empty(round_number)
        return played.groups

    def _note_empty(self, round_number: int) -> None:
        """A round without anything to imitate leaves the weights as they are; all of them are a mistake."""
        config = self._config
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

    def _return_to_start(self) -> None:
        start = load_reference(self.workshop, self.folder, is_resumed=True)
        self.workshop.model.load_state_dict(start.state_dict())
        self._learner = self._new_learner()

    def _new_learner(self) -> Learner:
        """Its schedule runs over all rounds, or over one where each begins anew."""
        total = self._config.steps if self._config.restart else self.steps
        return Learner(self.workshop.model, self._config.optimizer, total, seed=self.seed)

    def save(self, folder: Path) -> None:
        save_learner(folder, self._learner)
        state = {"player": self._player.state_dict(), "found_any": self._found_any}
        (folder / _STATE).write_text(json.dumps(state), encoding="utf-8")
        write_trajectories(folder / _KEPT, self._kept)

    def load(self, folder: Path) -> None:
        load_learner(folder, self._learner)
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        self._player.load_state_dict(state["player"])
        self._found_any = state["found_any"]
        self._kept = read_trajectories(folder / _KEPT)


def chosen(group: Group, config: RejectionConfig) -> list[Trajectory]:
    """The episodes of a group that are imitated: the best, and of equal ones the shorter."""
    good = [t for t in group.trainable if t.reward is not None and t.reward >= config.threshold]
    return sorted(good, key=lambda t: (-(t.reward or 0.0), t.turns, t.attempt))[: config.keep]
