"""Learning from preferences (DPO, IPO, SimPO, KTO), mined from played groups or given."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ludus.core.failures import ConfigError
from ludus.core.random import key
from ludus.core.trajectory import Group
from ludus.observe import rollout_metrics
from ludus.training.batches import items_of_step
from ludus.training.checkpoint import load_learner, save_learner
from ludus.training.learner import Learner
from ludus.training.playing import Player
from ludus.training.preference import (
    Labelled,
    Pair,
    labelled_of,
    pairs_of,
    prefer,
    says_the_same,
)
from ludus.training.settings import PreferenceConfig, RLConfig
from ludus.training.stages.checking import check_failures
from ludus.training.stages.given import given_preferences
from ludus.training.stages.reference import load_reference
from ludus.training.stages.stage import Stage, Step
from ludus.training.workshop import Workshop

log = logging.getLogger(__name__)

_STATE = "preference.json"


class Preference(Stage):
    """Learn to prefer the better of two episodes."""

    prefix = "dpo"

    def __init__(self, workshop: Workshop, folder: Path, config: PreferenceConfig) -> None:
        super().__init__(workshop, folder, config.steps)
        self._config = config
        self.phase = config.title
        # given pairs nobody sampled: they are read at temperature 1, mined ones as they were drawn
        temperature = workshop.recipe.sampling.temperature if config.pairs is None else 1.0
        self._learner = Learner(workshop.model, config.optimizer, config.steps, temperature, self.seed)
        self._player = _miner(workshop, config, self.seed) if config.pairs is None else None
        self._given: Sequence[Pair | Labelled] = []
        self._found_any = False
        """Whether any step so far has mined a pair."""
        self._reference: nn.Module | None = None

    async def begin(self) -> None:
        if self._config.loss != "simpo":
            self._reference = load_reference(self.workshop, self.folder, self.is_resumed)
        if self._config.pairs is not None:
            self._given = await given_preferences(self.workshop, self._config)
            equal = sum(isinstance(one, Pair) and says_the_same(one) for one in self._given)
            if equal:
                log.warning(
                    "in %d of %d pairs both sides say the same, which teaches nothing",
                    equal,
                    len(self._given),
                )

    async def advance(self, number: int) -> Step:
        started = time.perf_counter()
        groups: Sequence[Group] = []
        metrics: dict[str, float] = {}
        learned: Sequence[Pair | Labelled]
        if self._player is None:
            seed = key(self.seed, "dpo")
            learned = items_of_step(self._given, number, self._config.batch, seed)
        else:
            played = await self._player.play(number, {})
            check_failures(played.groups, self._config.max_failures)
            groups = played.groups
            pairs = pairs_of(groups, self._config.margin)
            metrics = rollout_metrics(groups)
            self._note_found(number, pairs)
            learned = labelled_of(pairs) if self._config.loss == "kto" else pairs
        await self.workshop.engine.pause()
        metrics["pairs"] = len(learned)
        with self.change():
            metrics |= prefer(self._learner, learned, self._reference, self._config)
        return Step({**metrics, "step_seconds": time.perf_counter() - started}, groups)

    def _note_found(self, number: int, pairs: Sequence[Pair]) -> None:
        """A step without pairs leaves the weights as they are; all of them are a mistake."""
        self._found_any |= bool(pairs)
        if number + 1 == self.steps and not self._found_any:
            apart = f" by {self._config.margin:g} at least" if self._config.margin else ""
            raise ConfigError(
                f"in {self.steps} step(s), no two attempts at a task differed in reward{apart}, so there was "
                "no pair to learn from: lower the margin, raise attempts or tasks, or use rewards that tell "
                "episodes apart"
            )

    def save(self, folder: Path) -> None:
        save_learner(folder, self._learner)
        if self._player is not None:
            state = {"player": self._player.state_dict(), "found_any": self._found_any}
            (folder / _STATE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        load_learner(folder, self._learner)
        if self._player is not None:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            self._player.load_state_dict(state["player"])
            self._found_any = state["found_any"]


def _miner(workshop: Workshop, config: PreferenceConfig, seed: int) -> Player:
    mining = RLConfig(algorithm="reinforce", tasks=config.tasks, attempts=config.attempts)
    return Player(workshop.task_sets, mining, seed)
