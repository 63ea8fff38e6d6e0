"""From the episodes of an evaluation to numbers with intervals. Pure.

Episodes that failed through our fault, were aborted or were not scored are counted and otherwise left
out: they are no zeros. A task that has lost so many attempts that fewer than k are left takes no part in
pass@k and average@k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ludus.core.success import is_success
from ludus.core.task import Task
from ludus.core.trajectory import Group, Trajectory
from ludus.observe.statistics import (
    Estimate,
    PairedTest,
    all_at_k,
    average_at_k,
    mean_interval,
    paired_test,
    pass_at_k,
)

ALL = "all"
"""What the whole task set is called beside its sub-tasks."""
NAMELESS = "(none)"
"""Where tasks go that do not say which sub-task they belong to."""

_SHARE = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Statistics:
    """How to summarise."""

    by: str | None = None
    """The metadata key that names a task's sub-task."""
    ks: tuple[int, ...] = ()
    """The k of pass@k, pass^k and average@k; powers of two up to the number of attempts when empty."""
    level: float = 0.95
    """How often an interval should hold the truth."""
    resamples: int = 10_000
    """Draws of a bootstrap."""
    success: Callable[[Trajectory], bool] = is_success
    """What counts as a success."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What was measured on a task set or a sub-task. What nothing was measured for is None or missing."""

    subtask: str
    tasks: int
    episodes: int
    """Played, the lost ones included."""
    scored: int
    """What the numbers below are over."""
    failed: int
    """Lost to failures of ours."""
    success: Estimate | None = None
    """Share of scored episodes that succeeded."""
    reward: Estimate | None = None
    """Mean reward of scored episodes."""
    average: Mapping[int, Estimate] = field(default_factory=dict)
    """average@k: the success of the first k attempts, averaged over tasks."""
    passed: Mapping[int, Estimate] = field(default_factory=dict)
    """pass@k: the chance that one of k attempts succeeds, averaged over tasks."""
    relied: Mapping[int, Estimate] = field(default_factory=dict)
    """pass^k: the chance that all of k attempts succeed, averaged over tasks."""
    turns: float | None = None
    """Mean number of actions."""
    truncated: float | None = None
    """Share of episodes that ran out of a budget."""

    @property
    def left_out(self) -> int:
        """Aborted, or not scored by any reward."""
        return self.episodes - self.scored - self.failed

    def as_json(self) -> dict[str, Any]:
        """The numbers under the names that reports use."""
        named = {"pass@": self.passed, "pass^": self.relied, "average@": self.average}
        return {
            "subtask": self.subtask,
            "tasks": self.tasks,
            "episodes": self.episodes,
            "scored": self.scored,
            "failed": self.failed,
            "left_out": self.left_out,
            "success": estimate_json(self.success),
            "reward": estimate_json(self.reward),
            **{
                f"{name}{k}": estimate_json(e) for name, found in named.items() for k, e in found.items()
            },
            "turns": self.turns,
            "truncated": self.truncated,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the tasks that both have scored attempts at."""

    subtask: str
    tasks: int
    unpaired: int
    """Tasks left out because one of the two has no scored attempt at them."""
    first: float
    second: float
    """Mean success by task, on the paired tasks."""
    test: PairedTest

    def as_json(self) -> dict[str, Any]:
        test = self.test
        return {
            "subtask": self.subtask,
            "tasks": self.tasks,
            "unpaired": self.unpaired,
            "first": self.first,
            "second": self.second,
            "difference": estimate_json(test.difference),
            "wins": test.wins,
            "losses": test.losses,
            "ties": test.ties,
            "p_flip": test.p_flip,
            "p_flip_is_exact": test.is_exact,
            "p_sign": test.p_sign,
        }


def summarise(groups: Sequence[Group], how: Statistics | None = None) -> list[Summary]:
    """The whole first, then each sub-task by name, where tasks are told apart by `how.by`."""
    how = how or Statistics()
    ks = how.ks or powers_of_two(max((len(group.trajectories) for group in groups), default=0))
    return [_summary(name, chosen, ks, how) for name, chosen in slices(groups, how.by)]


def compare(
    first: Sequence[Group], second: Sequence[Group], how: Statistics | None = None
) -> list[Comparison]:
    """`first` against `second`, paired by task: the whole, then each sub-task. Empty without pairs."""
    how = how or Statistics()
    others = dict(slices(second, how.by))
    found = [
        _comparison(name, _rates(chosen, how), _rates(others.get(name, []), how), how)
        for name, chosen in slices(first, how.by)
    ]
    return [comparison for comparison in found if comparison is not None]


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `most`, which is always among them."""
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return tuple(dict.fromkeys([*powers, most])) if most else ()


def slices(groups: Sequence[Group], by: str | None) -> list[tuple[str, list[Group]]]:
    """All groups, and those of each sub-task."""
    whole = [(ALL, list(groups))]
    if by is None:
        return whole
    parts: dict[str, list[Group]] = {}
    for group in groups:
        parts.setdefault(subtask_of(group.task, by), []).append(group)
    return whole + sorted(parts.items())


def subtask_of(task: Task, by: str) -> str:
    """Which sub-task a task says it belongs to."""
    value = task.metadata.get(by)
    return NAMELESS if value is None else str(value)


def _by_task(groups: Sequence[Group]) -> list[list[Trajectory]]:
    """The scored attempts at each task, in order; none for a task that lost them all."""
    found: dict[str, list[Trajectory]] = {}
    for group in groups:
        found.setdefault(group.task.id, []).extend(group.trainable)
    return [sorted(attempts, key=lambda trajectory: trajectory.attempt) for attempts in found.values()]


def _summary(name: str, groups: Sequence[Group], ks: Sequence[int], how: Statistics) -> Summary:
    played = [trajectory for group in groups for trajectory in group.trajectories]
    attempts = _by_task(groups)
    scored = [trajectory for attempt in attempts for trajectory in attempt]
    counted = Summary(
        subtask=name,
        tasks=len(attempts),
        episodes=len(played),
        scored=len(scored),
        failed=sum(trajectory.failure is not None for trajectory in played),
    )
    if not scored:
        return counted
    tasks = [task for task in attempts if task]
    outcomes = [[float(how.success(trajectory)) for trajectory in task] for task in tasks]
    rewards = [[trajectory.reward or 0.0 for trajectory in task] for task in tasks]
    return Summary(
        subtask=name,
        tasks=counted.tasks,
        episodes=counted.episodes,
        scored=counted.scored,
        failed=counted.failed,
        success=_pooled(outcomes, how, _SHARE),
        reward=_pooled(rewards, how, None),
        average=_at_k(outcomes, ks, how, average_at_k),
        passed=_at_k(outcomes, ks, how, lambda o, k: pass_at_k(len(o), round(sum(o)), k)),
        relied=_at_k(outcomes, ks, how, lambda o, k: all_at_k(len(o), round(sum(o)), k)),
        turns=sum(trajectory.turns for trajectory in scored) / len(scored),
        truncated=sum(trajectory.stop.is_truncated for trajectory in scored) / len(scored),
    )


def _pooled(
    values: Sequence[Sequence[float]], how: Statistics, within: tuple[float, float] | None
) -> Estimate:
    """The mean over all episodes, with whole tasks drawn again."""
    return mean_interval(
        [sum(task) for task in values],
        [len(task) for task in values],
        level=how.level,
        resamples=how.resamples,
        within=within,
    )


def _at_k(
    outcomes: Sequence[Sequence[float]],
    ks: Sequence[int],
    how: Statistics,
    estimate: Callable[[Sequence[float], int], float],
) -> dict[int, Estimate]:
    """The mean over tasks for each k, over those with at least k scored attempts."""
    found: dict[int, Estimate] = {}
    for k in ks:
        values = [estimate(task, k) for task in outcomes if len(task) >= k]
        if values:
            found[k] = mean_interval(values, level=how.level, resamples=how.resamples, within=_SHARE)
    return found


def _rates(groups: Sequence[Group], how: Statistics) -> dict[str, Fraction | None]:
    """The share of successes at each task, exactly; None for a task without a scored attempt."""
    found: dict[str, list[Trajectory]] = {}
    for group in groups:
        found.setdefault(group.task.id, []).extend(group.trainable)
    return {
        task: Fraction(sum(map(how.success, scored)), len(scored)) if scored else None
        for task, scored in found.items()
    }


def _comparison(
    name: str,
    first: Mapping[str, Fraction | None],
    second: Mapping[str, Fraction | None],
    how: Statistics,
) -> Comparison | None:
    pairs = [
        (ours, theirs)
        for task, ours in first.items()
        if ours is not None and (theirs := second.get(task)) is not None
    ]
    if not pairs:
        return None
    mine, others = [a for a, _ in pairs], [b for _, b in pairs]
    return Comparison(
        subtask=name,
        tasks=len(pairs),
        unpaired=len(first.keys() | second.keys()) - len(pairs),
        first=float(sum(mine) / len(mine)),
        second=float(sum(others) / len(others)),
        test=paired_test(mine, others, level=how.level, resamples=how.resamples),
    )


def estimate_json(estimate: Estimate | None) -> dict[str, float | None] | None:
    """An estimate as a table of JSON."""
    if estimate is None:
        return None
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
