"""What a step plays: tasks from one or several sets, mixed by weights, and settings that change while training.

Within a set, every task comes once an epoch, in an order that the seed and the epoch decide. The sampler has a
cursor for each set: refills take further tasks, and tasks above a curriculum's difficulty are skipped.
Everything is a function of seed, position and weights, so that a resumed run sees the tasks it would have seen.

A curriculum starts easy. A *schedule* says from which step on a value holds. An *adaptive* setting moves on by
itself when a metric, averaged over the last steps, says so. Both are state machines over the steps' metrics:
pure, resumable, and shown among the metrics as `curriculum/<setting>`. The growing horizon is that of
ScalingInter-RL: Xi et al., "AgentGym-RL: Training LLM Agents for Long-Horizon Decision Making through
Multi-Turn Reinforcement Learning", 2025, arXiv:2509.08755.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field, StrictFloat, StrictInt, ValidationError, model_validator

from ludus.core.config import Config
from ludus.core.config_errors import problem_lines
from ludus.core.failures import ConfigError
from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.observe import SPLITS, definition_of
from ludus.rollouts.recorder import Budgets
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
            one.name: {"sampled": cursor.sampled, "place": cursor.place}
            for one, cursor in zip(self.sets, self.cursors, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [one.name for one in self.sets]
        if sorted(state) != sorted(names):
            raise ConfigError(f"the saved run has the task sets {sorted(state)}, this one {names}")
        self.cursors = [Cursor(int(state[n]["sampled"]), int(state[n]["place"])) for n in names]

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


# Curricula.

BUDGETS = "budgets."
DIFFICULTY = "tasks.difficulty"
STRICTNESS = "rewards.strictness"


class AdaptiveConfig(Config):
    """A value that moves on when the model is ready for it."""

    start: float
    """Where it begins."""
    stop: float
    """Where it ends; it can be below the start."""
    by: float = Field(gt=0)
    """How far it moves at a time."""
    metric: str = "success"
    """The metric that decides: success, truncated, or any metric of a step."""
    above: float | None = None
    """Move on when the metric's mean is at least this."""
    below: float | None = None
    """Move on when the metric's mean is at most this."""
    over: int = Field(default=5, ge=1)
    """Over how many steps the mean is taken; they are counted anew after each move."""

    @model_validator(mode="after")
    def _can_move(self) -> AdaptiveConfig:
        if self.start == self.stop:
            raise ValueError(f"start and stop are both {self.start:g}, so the value would never move")
        if (self.above is None) == (self.below is None):
            raise ValueError("give exactly one of above and below")
        is_of_a_step = self.metric.partition("/")[0] not in SPLITS
        if not is_of_a_step or definition_of(self.metric) is None:
            raise ValueError(
                f"metric = {self.metric!r} is no metric of a step, so the value would never move "
                "(docs/metrics.md has them all)"
            )
        return self


class CurriculumConfig(Config):
    """One setting that changes: by a schedule, or adaptively."""

    setting: Literal[
        "budgets.max_turns",
        "budgets.max_tokens",
        "budgets.max_turn_tokens",
        "tasks.difficulty",
        "rewards.strictness",
    ]
    """A budget, the difficulty of the hardest tasks to draw, or how strict rewards are."""
    schedule: tuple[tuple[StrictInt, StrictFloat], ...] = ()
    """Pairs of (step, value): from that step of the stage on, the value holds."""
    adaptive: AdaptiveConfig | None = None
    """Or: when to move on."""

    @model_validator(mode="after")
    def _one_way(self) -> CurriculumConfig:
        if bool(self.schedule) == (self.adaptive is not None):
            raise ValueError("give exactly one of schedule and adaptive")
        steps = [step for step, _ in self.schedule]
        if self.schedule and (steps[0] != 0 or steps != sorted(set(steps))):
            raise ValueError("a schedule's steps start at 0 and rise")
        if self.setting.startswith(BUDGETS):
            self._check_budgets()
        return self

    @property
    def values(self) -> tuple[float, ...]:
        """Values of the schedule, or the two ends between which the setting moves."""
        if self.adaptive is not None:
            return (self.adaptive.start, self.adaptive.stop)
        return tuple(value for _, value in self.schedule)

    def _check_budgets(self) -> None:
        """Each value must be one that the budget itself could have."""
        name = self.setting.removeprefix(BUDGETS)
        for value in self.values:
            try:
                Budgets.model_validate({name: value})
            except ValidationError as error:
                (line,) = problem_lines(Budgets, error.errors())
                raise ValueError(f"{BUDGETS}{line.strip()}") from None
        if self.adaptive is not None and not self.adaptive.by.is_integer():
            raise ValueError(
                f"{self.setting} moves by whole numbers, not by {self.adaptive.by:g} (adaptive.by)"
            )


class Curriculum:
    """The scheduled settings of a stage, and where each of them stands."""

    def __init__(self, configs: Sequence[CurriculumConfig]) -> None:
        self._configs = list(configs)
        check_settings(configs)
        self._adaptive = {
            config.setting: _Adaptive(config.adaptive)
            for config in configs
            if config.adaptive is not None
        }

    def values(self, step: int) -> dict[str, float]:
        """The settings that hold in a step of the stage, by name."""
        return {
            config.setting: self._adaptive[config.setting].value
            if config.adaptive is not None
            else scheduled(config.schedule, step)
            for config in self._configs
        }

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a step; adaptive settings may move on by them."""
        for setting in self._adaptive.values():
            setting.observe(metrics)

    def state_dict(self) -> dict[str, Any]:
        return {name: setting.state_dict() for name, setting in self._adaptive.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, setting in self._adaptive.items():
            setting.load_state_dict(state[name])


def check_settings(configs: Sequence[CurriculumConfig]) -> None:
    """Refuse two of them for one setting."""
    names = [config.setting for config in configs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]} is moved twice by a curriculum; give it one schedule")


def scheduled(schedule: Sequence[tuple[int, float]], step: int) -> float:
    """The value of the last entry whose step has come."""
    return [value for start, value in schedule if start <= step][-1]


class _Adaptive:
    def __init__(self, config: AdaptiveConfig) -> None:
        self._config = config
        self.value = config.start
        self._seen: list[float] = []

    def observe(self, metrics: Mapping[str, float]) -> None:
        if self._config.metric not in metrics:
            return
        self._seen = [*self._seen, float(metrics[self._config.metric])][-self._config.over :]
        if len(self._seen) == self._config.over and self._is_ready(statistics.fmean(self._seen)):
            self.value = self._next()
            self._seen = []

    def _is_ready(self, mean: float) -> bool:
        above, below = self._config.above, self._config.below
        return (above is not None and mean >= above) or (below is not None and mean <= below)

    def _next(self) -> float:
        config = self._config
        if config.stop >= config.start:
            return min(config.stop, self.value + config.by)
        return max(config.stop, self.value - config.by)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._seen = float(state["value"]), [float(v) for v in state["seen"]]
