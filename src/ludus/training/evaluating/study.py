"""Playing models under budgets of turns, and going on where an earlier run stopped.

Models are opened one after the other, and only those with something left to play. Within one, budgets follow
each other, and all episodes of a budget overlap (the rollout's `max_in_flight` bounds them). A group is
written in a worker thread as soon as its last episode ends, and the next one is taken when it is on the disk.
Cancelling stops all episodes; what was written stays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from ludus.core.failures import ConfigError, LudusError
from ludus.core.generation import Sampling
from ludus.core.task import Task
from ludus.core.trajectory import Group
from ludus.rollouts.runner import Rollout
from ludus.training.evaluating.players import Player
from ludus.training.evaluating.results import Cell, ResultsFolder, is_finished
from ludus.training.evaluating.summary import Comparison, Statistics, Summary, compare, summarise
from ludus.training.evaluation import Evaluation, evaluation_of, evaluation_seed
from ludus.training.parts import Parts
from ludus.training.recipe import Recipe

OnGroup = Callable[[str, int, int, int], None]
"""Called as (model, turns, tasks finished, tasks in all) whenever one more task has been played."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play."""

    players: tuple[Player, ...]
    tasks: tuple[Task, ...]
    turns: tuple[int, ...]
    """The budgets of turns to play under, each with the same tasks and draws."""
    attempts: int
    sampling: Sampling
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.players or not self.tasks or not self.turns:
            raise ConfigError("an evaluation needs a model, tasks, and a number of turns")
        if self.attempts < 1 or min(self.turns) < 1:
            raise ConfigError("attempts and turns are at least 1")
        for label, count in Counter(player.label for player in self.players).items():
            if count > 1:
                raise ConfigError(f"the model {label!r} is named {count} times; name it once")

    @property
    def cells(self) -> int:
        """How often the whole task set is played."""
        return len(self.players) * len(self.turns)


@dataclass(frozen=True, slots=True)
class Measured:
    """One model under one budget of turns."""

    model: str
    turns: int
    evaluation: Evaluation
    kept: int
    """How many tasks had been played by an earlier run."""


@dataclass(frozen=True)
class Study:
    """All that was measured, and how to look at it."""

    measured: tuple[Measured, ...]
    how: Statistics
    against: str | None = None
    """The label of the model that the others are compared with."""

    @cached_property
    def summaries(self) -> list[tuple[Measured, Summary]]:
        """Every measurement: the whole, and its sub-tasks."""
        return [
            (m, summary) for m in self.measured for summary in summarise(m.evaluation.groups, self.how)
        ]

    @cached_property
    def comparisons(self) -> list[tuple[Measured, Comparison]]:
        """Every other model minus `against`, under the same budget."""
        others = {m.turns: m for m in self.measured if m.model == self.against}
        return [
            (m, comparison)
            for m in self.measured
            if m.model != self.against and m.turns in others
            for comparison in compare(m.evaluation.groups, others[m.turns].evaluation.groups, self.how)
        ]


async def run_study(
    recipe: Recipe,
    parts: Parts,
    plan: Plan,
    how: Statistics | None = None,
    *,
    against: str | None = None,
    results: ResultsFolder | None = None,
    on_group: OnGroup | None = None,
) -> Study:
    """Play what is not in `results` yet; without a folder, everything, and nothing is kept."""
    measured: list[Measured] = []
    for player in plan.players:
        measured += await _play(recipe, parts, plan, player, results, on_group)
    return Study(tuple(measured), how or Statistics(), against)


async def _play(
    recipe: Recipe,
    parts: Parts,
    plan: Plan,
    player: Player,
    results: ResultsFolder | None,
    on_group: OnGroup | None,
) -> list[Measured]:
    boards = [_Board(plan, player.label, turns, on_group) for turns in plan.turns]
    if results is not None:
        identity = player.identity(recipe)
        for board in boards:
            await board.load(results.cell(player.label, identity, board.turns))
    if any(board.missing for board in boards):
        async with player.open(recipe, parts) as rollout:
            for board in boards:
                await board.play(rollout)
    return [board.measured() for board in boards]


class _Board:
    """One model under one budget: what has been played, and what is missing."""

    def __init__(self, plan: Plan, model: str, turns: int, on_group: OnGroup | None) -> None:
        self.turns = turns
        self._plan = plan
        self._model = model
        self._on_group = on_group or (lambda model, turns, done, total: None)
        self._cell: Cell | None = None
        self._groups: dict[str, Group] = {}
        self.missing = list(plan.tasks)
        self._kept = 0

    async def load(self, cell: Cell) -> None:
        self._cell = cell
        self._groups = await asyncio.to_thread(cell.groups, self._plan.tasks)
        self.missing = [
            task
            for task in self._plan.tasks
            if task.id not in self._groups or not is_finished(self._groups[task.id], self._plan.attempts)
        ]
        self._kept = len(self._plan.tasks) - len(self.missing)

    async def play(self, rollout: Rollout) -> None:
        plan = self._plan
        numbers = {task.id: number for number, task in enumerate(plan.tasks)}
        playing = replace(
            rollout,
            attempts=plan.attempts,
            sampling=plan.sampling,
            budgets=rollout.budgets.model_copy(update={"max_turns": self.turns}),
        )
        done = self._kept
        played = playing.groups(self.missing, evaluation_seed(plan.seed))
        async with aclosing(cast(AsyncGenerator[Group, None], played)) as groups:
            async for group in groups:
                self._groups[group.task.id] = group
                if self._cell is not None:
                    await asyncio.to_thread(self._cell.write, group, numbers[group.task.id])
                done += 1
                self._on_group(self._model, self.turns, done, len(plan.tasks))
        self.missing = []
        self._check_scored()
        if self._cell is not None:
            await asyncio.to_thread(self._cell.close, list(self.measured().evaluation.groups))

    def measured(self) -> Measured:
        evaluation = evaluation_of(list(self._groups.values()), self._plan.tasks)
        return Measured(self._model, self.turns, evaluation, self._kept)

    def _check_scored(self) -> None:
        """Nothing at all was measured: say why, instead of a table of dashes."""
        played = [t for group in self._groups.values() for t in group.trajectories]
        if any(trajectory.is_trainable for trajectory in played):
            return
        failures = Counter((t.failure.boundary, t.failure.message) for t in played if t.failure)
        if not failures:
            raise ConfigError(
                f"none of {len(played)} episodes was scored: there are no rewards, or they return None. List "
                "rewards in the recipe, or pass rewards="
            )
        (boundary, message), count = failures.most_common(1)[0]
        raise LudusError(
            f"no episode of {self._model} could be scored: {failures.total()} of {len(played)} failed through "
            f"no fault of the model's. Most often ({count} times), at the boundary '{boundary}': {message}"
        )
