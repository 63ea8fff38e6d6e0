"""The task sampler: which tasks a step gets, from one or several task sets mixed by weights.

Within a set, every task comes once an epoch, in an order that the seed and the epoch decide. The sampler has a
cursor for each set: refills take further tasks, and tasks above a curriculum's difficulty are skipped.
Everything is a function of seed, position and weights, so that a resumed run sees the tasks it would have seen.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ludus.core.failures import ConfigError
from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.rollouts.rollout import Rollout


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


class SampledTask(NamedTuple):
    """A task, the number of the set it comes from, and its place in that set."""

    set: int
    task: Task
    place: int = 0


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far one set has been used."""

    sampled: int = 0
    """Tasks sampled by weight; refills do not count."""
    place: int = 0
    """The next place in the set's endless order."""


@dataclass(slots=True)
class TaskSampler:
    """Samples tasks from several sets by their weights. A copy samples the same ones, independently."""

    sets: Sequence[TaskSet]
    seed: int
    cursors: list[Cursor] = field(default_factory=list)
    difficulties: dict[int, Sequence[float]] = field(default_factory=dict)
    """Task difficulties of the sets for which a curriculum has asked; copies share them."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.sets]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"task sets need different names, and there must be one: {names}")
        for one in self.sets:
            if not one.tasks:
                raise ConfigError(f"the task set {one.name!r} has no tasks to learn from")
        self.cursors = self.cursors or [Cursor() for _ in self.sets]

    def copy(self) -> TaskSampler:
        return replace(self, cursors=list(self.cursors))

    def sample(self, size: int, hardest: float | None = None) -> list[SampledTask]:
        """The next `size` tasks, from all sets by their weights; none above the difficulty `hardest`."""
        numbers = next_sets([one.weight for one in self.sets], [c.sampled for c in self.cursors], size)
        tasks = self.sample_from(numbers, hardest)
        for number, cursor in enumerate(self.cursors):
            self.cursors[number] = replace(cursor, sampled=cursor.sampled + numbers.count(number))
        return tasks

    def sample_from(self, numbers: Sequence[int], hardest: float | None = None) -> list[SampledTask]:
        """One further task from each of these sets: replacements, which do not count for the weights."""
        sampled = {
            number: iter(self._advance(number, numbers.count(number), hardest))
            for number in sorted(set(numbers))
        }
        return [
            SampledTask(number, self.sets[number].tasks[place], place)
            for number in numbers
            for place in [next(sampled[number])]
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            one.name: {"dealt": cursor.sampled, "place": cursor.place}
            for one, cursor in zip(self.sets, self.cursors, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [one.name for one in self.sets]
        if sorted(state) != sorted(names):
            raise ConfigError(f"the saved run has the task sets {sorted(state)}, this one {names}")
        self.cursors = [Cursor(int(state[n]["dealt"]), int(state[n]["place"])) for n in names]

    def _advance(self, number: int, size: int, hardest: float | None) -> list[int]:
        """The places of the set's next `size` tasks."""
        one, cursor = self.sets[number], self.cursors[number]

        if hardest is not None and number not in self.difficulties:
            self.difficulties[number] = array("d", map(difficulty_of, one.tasks))
        known = self.difficulties.get(number, ())

        def fits(index: int) -> bool:
            return hardest is None or known[index] <= hardest

        if not any(map(fits, range(len(one.tasks)))):
            raise ConfigError(
                f"no task of the set {one.name!r} has a difficulty of at most {hardest:g}; start the "
                "curriculum of tasks.difficulty higher"
            )
        seed = seed_of_set(self.seed, number, one.name)
        chosen: list[int] = []
        place = cursor.place
        for index in epoch_order(len(one.tasks), place, seed):
            if len(chosen) == size:
                break
            place += 1
            if fits(index):
                chosen.append(index)
        self.cursors[number] = replace(cursor, place=place)
        return chosen


def seed_of_set(seed: int, number: int, name: str) -> int:
    """The key of a set's draws. The first one's is that of a run with this set alone.

    Sets may have tasks of the same id, whose order, sessions and draws must not be the same.
    """
    return seed if number == 0 else key(seed, "set", name)


def difficulty_of(task: Task) -> float:
    """The difficulty in the task's metadata; a task without one is never too hard."""
    value = task.metadata.get("difficulty", -math.inf)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"task {task.id!r}: its difficulty must be a number, not {value!r:.60}")
    return float(value)


T = TypeVar("T")


def items_of_step(items: Sequence[T], step: int, size: int, seed: int) -> list[T]:
    """The `size` items of step number `step`; a batch that crosses an epoch's end goes on in the next."""
    return [items[i] for i in islice(epoch_order(len(items), step * size, seed), size)]


def epoch_order(count: int, place: int, seed: int) -> Iterator[int]:
    """The numbers below `count` from a place on, epoch by epoch, for ever: each of them once an epoch."""
    while True:
        epoch, offset = divmod(place, count)
        order = _epoch(count, key(seed, "epoch", epoch))
        yield from (order[i] for i in range(offset, count))
        place += count - offset


@lru_cache(maxsize=16)
def _epoch(count: int, seed: int) -> Sequence[int]:
    """The order of an epoch, which is asked for again with every task."""
    return array("q", shuffled(count, seed))


def next_sets(weights: Sequence[float], drawn: Sequence[int], size: int) -> list[int]:
    """The sets of the next `size` items, when `drawn` have come from each of them so far.

    Every prefix follows the weights as closely as any sequence can: after n items, a set with share w has
    had w * n of them, give or take 1 - 1 / (2 * sets - 2). Of the sets that are at all due, the one goes
    first whose deadline for staying within that bound comes first. Tijdeman, "The chairman assignment
    problem", Discrete Mathematics 32, 1980.
    """
    if len(weights) == 1:
        return [0] * size
    total = sum(map(Fraction, weights))  # exact, because a rounded tie could leave no set due
    shares = [Fraction(weight) / total for weight in weights]
    slack = Fraction(1, 2 * len(weights) - 2)
    had, place = list(drawn), sum(drawn)
    chosen: list[int] = []
    for n in range(place + 1, place + size + 1):
        due = [i for i, share in enumerate(shares) if share * n - had[i] >= slack]
        first = min(due, key=lambda i: (had[i] + 1 - slack) / shares[i])
        had[first] += 1
        chosen.append(first)
    return chosen
