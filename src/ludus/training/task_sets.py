"""Several task sets in one run: each with its own tasks, tools, rewards and budgets, mixed by weights.

A `Deck` deals the tasks of a step. It has a cursor for each set, because a set is walked through at a pace
of its own: refills take further tasks, and tasks that are too hard yet are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import Field, field_serializer

from ludus.core.config import Config, Place
from ludus.core.failures import ConfigError
from ludus.core.random import key
from ludus.core.task import Task
from ludus.rollouts.budgets import Budgets
from ludus.rollouts.runner import Rollout
from ludus.training.batches import next_sets, walk

PER_SET = ("success", "reward", "turns", "episodes")
"""What a step tells of each task set, where there are several: sets/NAME/success, ..."""


class TaskSetConfig(Config):
    """One of several task sets. What it leaves out is as the recipe says."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """What its metrics are called: sets/NAME/..."""
    train: Place
    """Tasks to learn from: a file, 'dataset:NAME:CONFIG@SPLIT', or 'module:function'."""
    evaluation: Place | None = None
    """Held-out tasks."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column of the data is which field, as in tasks.columns."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the tasks, relative to the other sets' weights."""
    tools: tuple[str | dict[str, Any], ...] | None = None
    """Tools, as in agent.tools."""
    envs: dict[str, str] | None = None
    """Environments, as in agent.envs."""
    rewards: tuple[str | dict[str, Any], ...] | None = None
    """Rewards, as in the recipe."""
    group_rewards: tuple[str | dict[str, Any], ...] | None = None
    """Group rewards, as in the recipe."""
    budgets: Budgets | None = None
    """Limits on an episode; those that are left out are the recipe's."""
    system: str | None = None
    """A system message, as in agent.system."""

    @field_serializer("budgets")
    def _limits(self, budgets: Budgets | None) -> dict[str, Any] | None:
        """Those that were given: written out in full, they would replace the recipe's when read again."""
        return None if budgets is None else budgets.model_dump(exclude_unset=True)


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A task set, loaded: its tasks, and the rollout that plays them."""

    name: str
    weight: float
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    rollout: Rollout
    limits: Mapping[str, float] = field(default_factory=dict)
    """The budgets that are the set's own; a curriculum does not go beyond them."""


class Dealt(NamedTuple):
    """A task, and the number of the set it comes from."""

    set: int
    task: Task


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far one set has been used."""

    dealt: int = 0
    """Tasks dealt by weight; refills are not counted, for they replace what was."""
    place: int = 0
    """The next place in the set's endless order."""


@dataclass(slots=True)
class Deck:
    """Deals tasks from several sets by their weights. A copy deals the same ones, independently."""

    sets: Sequence[TaskSet]
    seed: int
    cursors: list[Cursor] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [one.name for one in self.sets]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"task sets need different names, and there must be one: {names}")
        for one in self.sets:
            if not one.tasks:
                raise ConfigError(f"the task set {one.name!r} has no tasks to learn from")
        self.cursors = self.cursors or [Cursor() for _ in self.sets]

    def copy(self) -> Deck:
        return replace(self, cursors=list(self.cursors))

    def deal(self, size: int, hardest: float | None = None) -> list[Dealt]:
        """The next `size` tasks, from all sets by their weights; none above the difficulty `hardest`."""
        numbers = next_sets([one.weight for one in self.sets], [c.dealt for c in self.cursors], size)
        tasks = self.deal_from(numbers, hardest)
        for number, cursor in enumerate(self.cursors):
            self.cursors[number] = replace(cursor, dealt=cursor.dealt + numbers.count(number))
        return tasks

    def deal_from(self, numbers: Sequence[int], hardest: float | None = None) -> list[Dealt]:
        """One further task for each of these set numbers: replacements, which no weight counts."""
        dealt = {
            number: iter(self._advance(number, numbers.count(number), hardest))
            for number in sorted(set(numbers))
        }
        return [Dealt(number, next(dealt[number])) for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        return {
            one.name: {"dealt": cursor.dealt, "place": cursor.place}
            for one, cursor in zip(self.sets, self.cursors, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [one.name for one in self.sets]
        if sorted(state) != sorted(names):
            raise ConfigError(f"the saved run has the task sets {sorted(state)}, this one {names}")
        self.cursors = [Cursor(int(state[n]["dealt"]), int(state[n]["place"])) for n in names]

    def _advance(self, number: int, size: int, hardest: float | None) -> list[Task]:
        one, cursor = self.sets[number], self.cursors[number]
        fits = [hardest is None or difficulty_of(task) <= hardest for task in one.tasks]
        if not any(fits):
            raise ConfigError(
                f"no task of the set {one.name!r} has a difficulty of at most {hardest:g}; start the "
                "curriculum of tasks.difficulty higher"
            )
        seed = seed_of_set(self.seed, number, one.name)
        chosen: list[Task] = []
        place = cursor.place
        for index in walk(len(one.tasks), place, seed):
            if len(chosen) == size:
                break
            place += 1
            if fits[index]:
                chosen.append(one.tasks[index])
        self.cursors[number] = replace(cursor, place=place)
        return chosen


def seed_of_set(seed: int, number: int, name: str) -> int:
    """The key of a set's draws. The first one's is that of a run with this set alone.

    Sets may have tasks of the same id, whose order, sessions and draws must not be the same.
    """
    return seed if number == 0 else key(seed, "set", name)


def difficulty_of(task: Task) -> float:
    """What the task's metadata say; a task that says nothing is never too hard."""
    value = task.metadata.get("difficulty", -math.inf)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"task {task.id!r}: its difficulty must be a number, not {value!r:.60}")
    return float(value)
