"""What a step plays: tasks from one or several sets, mixed by weights.

Within a set, every task comes once an epoch, in an order that the seed and the epoch decide. The sampler has a
cursor for each set: refills take further tasks, and tasks above a curriculum's difficulty are skipped.
Everything is a function of seed, position and weights, so that a resumed run sees the tasks it would have seen.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ludus.core.failures import ConfigError
from ludus.core.random import key, shuffled
from ludus.core.registry import Registry, load_function
from ludus.core.task import Task
from ludus.core.trajectory import Group, is_success
from ludus.core.user_code import error_with_location
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


class TaskRecord(NamedTuple):
    """What the groups of a task that have been played say of it."""

    groups: int = 0
    """How many there were."""
    success: float = 0.0
    """Share of the newest group's scored attempts that succeeded."""
    reward: float = 0.0
    """Their mean reward."""


ChooseTask = Callable[[Sequence[Task], Mapping[str, TaskRecord], int], int]
"""A task sampler: the place of the next task among a set's tasks, from the records by task id and a seed that
is another one for every draw."""

SAMPLERS = Registry("task sampler", {"learnable": "ludus.training.data.tasks:learnable"})
"""Samplers of tasks for `rl.sampler`; without one, every task comes once an epoch."""
_CANDIDATES = 64


def learnable(tasks: Sequence[Task], records: Mapping[str, TaskRecord], seed: int) -> int:
    """Of some tasks, one that sometimes succeeds: by the variance of its success, p (1 - p).

    A task that was not played counts as p = 1/2; what always or never succeeds comes back now and then.
    """
    draw = Random(seed)
    candidates = [draw.randrange(len(tasks)) for _ in range(_CANDIDATES)]
    shares = [records[tasks[i].id].success if tasks[i].id in records else 0.5 for i in candidates]
    return draw.choices(candidates, [0.02 + p * (1 - p) for p in shares])[0]


@dataclass(slots=True)
class TaskSampler:
    """Samples tasks from several sets by their weights. A copy samples the same ones, independently."""

    sets: Sequence[TaskSet]
    seed: int
    cursors: list[Cursor] = field(default_factory=list)
    difficulties: dict[int, Sequence[float]] = field(default_factory=dict)
    """Task difficulties of the sets for which a curriculum has asked; copies share them."""
    choose: str | None = None
    """Chooses the tasks within a set (`SAMPLERS`); None: every task once an epoch."""
    records: dict[int, dict[str, TaskRecord]] = field(default_factory=dict)
    """By set and task id, where tasks are chosen."""

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

    def observe(self, number: int, group: Group) -> None:
        """Take in a played group of a set."""
        scored = group.trainable
        if self.choose is None or not scored:
            return
        own = self.records.setdefault(number, {})
        own[group.task.id] = TaskRecord(
            own.get(group.task.id, TaskRecord()).groups + 1,
            statistics.fmean(map(is_success, scored)),
            statistics.fmean(one.reward or 0.0 for one in scored),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            one.name: {"sampled": cursor.sampled, "place": cursor.place}
            | ({"records": dict(self.records.get(number, {}))} if self.choose is not None else {})
            for number, (one, cursor) in enumerate(zip(self.sets, self.cursors, strict=True))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [one.name for one in self.sets]
        if sorted(state) != sorted(names):
            raise ConfigError(f"the saved run has the task sets {sorted(state)}, this one {names}")
        self.cursors = [Cursor(int(state[n]["sampled"]), int(state[n]["place"])) for n in names]
        self.records = {
            number: {task: TaskRecord(*one) for task, one in state[name].get("records", {}).items()}
            for number, name in enumerate(names)
        }

    def _advance(self, number: int, size: int, hardest: float | None) -> list[int]:
        """The places of the set's next `size` tasks."""
        one, cursor = self.sets[number], self.cursors[number]
        if self.choose is not None:
            places = [self._chosen(number, cursor.place + n, hardest) for n in range(size)]
            self.cursors[number] = replace(cursor, place=cursor.place + size)
            return places

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

    def _chosen(self, number: int, draw: int, hardest: float | None) -> int:
        """What the sampler chooses as the set's draw of this number."""
        one, records = self.sets[number], MappingProxyType(self.records.get(number, {}))
        if hardest is not None:
            raise ConfigError(
                "rl.sampler and a curriculum of tasks.difficulty both choose tasks: leave out one"
            )
        seed = key(seed_of_set(self.seed, number, one.name), "sampler", draw)
        assert self.choose is not None
        try:
            chosen = load_sampler(self.choose)(one.tasks, records, seed)
        except Exception as error:
            raise ConfigError(f"rl.sampler {self.choose} raised {error_with_location(error)}") from error
        if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < len(one.tasks):
            raise ConfigError(
                f"rl.sampler {self.choose} gave {chosen!r:.60}, which is no place among the {len(one.tasks)} "
                f"tasks of the set {one.name!r}"
            )
        return chosen


def load_sampler(name: str) -> ChooseTask:
    found: ChooseTask = load_function("rl.sampler", SAMPLERS.get(name, name))
    return found


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
