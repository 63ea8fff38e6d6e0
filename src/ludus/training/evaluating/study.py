"""Playing models under budgets of turns, and going on where an earlier run stopped.

Models are opened one after the other, and only those with something left to play. Within one, budgets follow
each other, and under a budget the task sets; all episodes of a set overlap (the rollout's `max_in_flight`
bounds them). A group is written in a worker thread as soon as its last episode ends, and the next one is taken
when it is on the disk. Cancelling stops all episodes; what was written stays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from ludus.core.failures import ConfigError, LudusError, most_frequent
from ludus.core.generation import Sampling
from ludus.core.task import Task
from ludus.core.trajectory import Group
from ludus.rollouts.runner import Rollout
from ludus.training.evaluating.players import Player
from ludus.training.evaluating.results import Cell, ResultsFolder, is_finished
from ludus.training.evaluating.summary import Comparison, Statistics, Summary, compare, summarise
from ludus.training.evaluation import Evaluation, evaluation_of, evaluation_seed, joined
from ludus.training.parts import Parts
from ludus.training.recipe import Recipe
from ludus.training.set_building import SetPlan
from ludus.training.task_sets import seed_of_set

OnGroup = Callable[[str, int, int, int], None]
"""Called as (model, turns, tasks finished, tasks in all) whenever one more task has been played."""


@dataclass(frozen=True, slots=True)
class Part:
    """The tasks of one task set."""

    name: str
    tasks: tuple[Task, ...]
    max_turns: int
    """The set's own budget of turns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play."""

    players: tuple[Player, ...]
    parts: tuple[Part, ...]
    turns: tuple[int, ...]
    """The budgets of turns to play under, each with the same tasks and draws; empty: each set's own."""
    attempts: int
    sampling: Sampling
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.players or not self.parts or not all(part.tasks for part in self.parts):
            raise ConfigError("an evaluation needs a model and tasks")
        if self.attempts < 1 or min(self.turns, default=1) < 1:
            raise ConfigError("attempts and turns are at least 1")
        for label, count in Counter(player.label for player in self.players).items():
            if count > 1:
                raise ConfigError(f"the model {label!r} is named {count} times; name it once")


def parts_of(sets: Sequence[SetPlan], most: int | None = None) -> tuple[Part, ...]:
    """The held-out tasks of each set that has any, or the first `most` of them."""
    found = [(one, tuple(one.parts.held_out[:most])) for one in sets]
    return tuple(Part(one.name, tasks, one.recipe.budgets.max_turns) for one, tasks in found if tasks)


@dataclass(frozen=True, slots=True)
class Measured:
    """One model under one budget of turns, on all task sets."""

    model: str
    turns: int
    """The budget; where sets have budgets of their own, the largest."""
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
    rounds = [_Round(plan, player.label, turns, on_group) for turns in plan.turns or (None,)]
    if results is not None:
        for one in rounds:
            await one.load(results, player.identity(recipe))
    if any(one.is_missing for one in rounds):
        async with player.open(recipe, parts) as sets:
            for one in rounds:
                await one.play({made.name: made.rollout for made in sets})
    return [one.measured() for one in rounds]


class _Round:
    """One model under one budget, or under each set's own: a board for each task set."""

    def __init__(self, plan: Plan, model: str, turns: int | None, on_group: OnGroup | None) -> None:
        self._model = model
        self._turns = turns or max(part.max_turns for part in plan.parts)
        self._total = sum(len(part.tasks) for part in plan.parts)
        self._on_group = on_group or (lambda model, turns, done, total: None)
        self._done = 0
        self._boards = {
            part.name: _Board(plan, number, model, turns or part.max_turns, self._note)
            for number, part in enumerate(plan.parts)
        }

    @property
    def is_missing(self) -> bool:
        return any(board.missing for board in self._boards.values())

    async def load(self, results: ResultsFolder, identity: Mapping[str, Any]) -> None:
        several = len(self._boards) > 1
        for name, board in self._boards.items():
            cell = results.cell(self._model, identity, board.turns, name if several else None)
            await board.load(cell)
            self._done += board.kept

    async def play(self, rollouts: Mapping[str, Rollout]) -> None:
        for name, board in self._boards.items():
            if board.missing:
                await board.play(rollouts[name])

    def measured(self) -> Measured:
        found = joined({name: board.evaluation for name, board in self._boards.items()})
        kept = sum(board.kept for board in self._boards.values())
        return Measured(self._model, self._turns, found, kept)

    def _note(self) -> None:
        self._done += 1
        self._on_group(self._model, self._turns, self._done, self._total)


class _Board:
    """One model under one budget on one task set: what has been played, and what is missing."""

    def __init__(
        self, plan: Plan, number: int, model: str, turns: int, on_group: Callable[[], None]
    ) -> None:
        part = plan.parts[number]
        self.turns = turns
        self.missing = list(part.tasks)
        self.kept = 0
        """How many tasks an earlier run has played."""
        self._plan = plan
        self._tasks = part.tasks
        self._seed = seed_of_set(plan.seed, number, part.name)
        self._model = model
        self._on_group = on_group
        self._cell: Cell | None = None
        self._groups: dict[str, Group] = {}

    @property
    def evaluation(self) -> Evaluation:
        return evaluation_of(list(self._groups.values()), self._tasks)

    async def load(self, cell: Cell) -> None:
        self._cell = cell
        self._groups = await asyncio.to_thread(cell.groups, self._tasks)
        self.missing = [
            task
            for task in self._tasks
            if task.id not in self._groups or not is_finished(self._groups[task.id], self._plan.attempts)
        ]
        self.kept = len(self._tasks) - len(self.missing)

    async def play(self, rollout: Rollout) -> None:
        plan = self._plan
        numbers = {task.id: number for number, task in enumerate(self._tasks)}
        playing = replace(
            rollout,
            attempts=plan.attempts,
            sampling=plan.sampling,
            budgets=rollout.budgets.model_copy(update={"max_turns": self.turns}),
        )
        played = playing.groups(self.missing, evaluation_seed(self._seed))
        async with aclosing(cast(AsyncGenerator[Group, None], played)) as groups:
            async for group in groups:
                self._groups[group.task.id] = group
                if self._cell is not None:
                    await asyncio.to_thread(self._cell.write, group, numbers[group.task.id])
                self._on_group()
        self.missing = []
        self._check_scored()
        if self._cell is not None:
            await asyncio.to_thread(self._cell.close, list(self.evaluation.groups))

    def _check_scored(self) -> None:
        """Nothing at all was measured: say why, instead of a table of dashes."""
        played = [t for group in self._groups.values() for t in group.trajectories]
        if any(trajectory.is_trainable for trajectory in played):
            return
        failures = [t.failure for t in played if t.failure is not None]
        if not failures:
            raise ConfigError(
                f"none of {len(played)} episodes was scored: there are no rewards, or they return None. List "
                "rewards in the recipe, or pass rewards="
            )
        raise LudusError(
            f"no episode of {self._model} could be scored: {len(failures)} of {len(played)} failed through "
            f"no fault of the model's. {most_frequent(failures)}"
        )
