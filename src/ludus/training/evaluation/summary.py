"""From the episodes of an evaluation to numbers with intervals. Pure.

Episodes that failed through our fault, were aborted or were not scored are counted and otherwise left out. What
was lost may have been easy or hard, so intervals of shares allow for both (worst-case bounds, Manski 1990): the
lower end counts every lost episode as 0, the upper end as 1. Rewards have no such bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from ludus.core.task import Task
from ludus.core.trajectory import Group, Trajectory, is_lost, is_success
from ludus.observe import (
    Cell,
    Estimate,
    PairedTest,
    Share,
    all_at_k,
    average_at_k,
    estimate_json,
    mean_interval,
    paired_test,
    pass_at_k,
)

ALL = "all"
"""Name of the whole task set beside its sub-tasks."""
NAMELESS = "(none)"
"""Where tasks go that do not say which sub-task they belong to."""

_SHARE = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class SummaryOptions:
    """How to summarise."""

    by: str | None = None
    """The metadata key that names a task's sub-task."""
    ks: tuple[int, ...] = ()
    """The k of pass@k, pass^k and average@k; powers of two up to the number of attempts when empty."""
    level: float = 0.95
    """How often an interval should hold the truth."""
    success: Callable[[Trajectory], bool] = is_success
    """Whether an episode is a success."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Measurements on a task set or a sub-task. A number without data is None or missing."""

    subtask: str
    tasks: int
    episodes: int
    """Played, the lost ones included."""
    scored: int
    """Scored episodes, on which the numbers below are computed."""
    failed: int
    """Lost to infrastructure failures."""
    success: Estimate | None = None
    """Share of scored episodes that succeeded; the interval allows for those that were lost."""
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

    bounds: tuple[float, float] | None = None
    """The share of success if every lost episode had failed, and if every one had succeeded."""

    @property
    def left_out(self) -> int:
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
            "success_bounds": self.bounds,
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


TESTED = ("difference", "+/-/=", "p flip", "p sign")
"""The columns of a paired test of shares."""


def test_cells(test: PairedTest) -> list[Cell]:
    return [
        Share.of(test.difference),
        f"{test.wins}/{test.losses}/{test.ties}",
        f"{'' if test.is_exact else '≈ '}{test.p_flip:.2g}",
        f"{test.p_sign:.2g}",
    ]


def summarise(groups: Sequence[Group], how: SummaryOptions | None = None) -> list[Summary]:
    """A summary of the whole, then of each sub-task by name, where `how.by` is given."""
    how = how or SummaryOptions()
    ks = how.ks or powers_of_two(max((len(group.trajectories) for group in groups), default=0))
    return [_summary(name, chosen, ks, how) for name, chosen in slices(groups, how.by)]


def compare(
    first: Sequence[Group], second: Sequence[Group], how: SummaryOptions | None = None
) -> list[Comparison]:
    """`first` against `second`, paired by task: the whole, then each sub-task. Empty without pairs."""
    how = how or SummaryOptions()
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
    whole = [(ALL, list(groups))]
    if by is None:
        return whole
    parts: dict[str, list[Group]] = {}
    for group in groups:
        parts.setdefault(subtask_of(group.task, by), []).append(group)
    return whole + sorted(parts.items())


def subtask_of(task: Task, by: str) -> str:
    value = task.metadata.get(by)
    return NAMELESS if value is None else str(value)


def _by_task(groups: Sequence[Group]) -> dict[str, list[Trajectory]]:
    """All attempts at each task, in order, the lost ones included."""
    found: dict[str, list[Trajectory]] = {}
    for group in groups:
        found.setdefault(group.task.id, []).extend(group.trajectories)
    return {task: sorted(played, key=lambda one: one.attempt) for task, played in found.items()}


def _outcomes(
    attempts: Sequence[Sequence[Trajectory]], how: SummaryOptions, lost: float | None = None
) -> list[list[float]]:
    """The successes at each task with any; where `lost` is given, lost episodes count as that."""
    found = [
        [
            float(how.success(one)) if one.is_trainable else lost
            for one in task
            if one.is_trainable or (lost is not None and is_lost(one))
        ]
        for task in attempts
    ]
    return [[value for value in task if value is not None] for task in found if task]


def _summary(name: str, groups: Sequence[Group], ks: Sequence[int], how: SummaryOptions) -> Summary:
    attempts = list(_by_task(groups).values())
    played = [trajectory for task in attempts for trajectory in task]
    scored = [trajectory for trajectory in played if trajectory.is_trainable]
    counted = Summary(
        subtask=name,
        tasks=len(attempts),
        episodes=len(played),
        scored=len(scored),
        failed=sum(trajectory.failure is not None for trajectory in played),
    )
    if not scored:
        return counted
    seen, worst, best = (_outcomes(attempts, how, lost) for lost in (None, 0.0, 1.0))
    cases = (seen, worst, best) if any(map(is_lost, played)) else (seen,)
    rewards = [[one.reward or 0.0 for one in task if one.is_trainable] for task in attempts]
    return replace(
        counted,
        success=_widened(*(_pooled(case, how, _SHARE) for case in cases)),
        bounds=(_mean(worst), _mean(best)),
        reward=_pooled([task for task in rewards if task], how, None),
        average=_at_k(cases, ks, how, average_at_k),
        passed=_at_k(cases, ks, how, lambda o, k: pass_at_k(len(o), round(sum(o)), k)),
        relied=_at_k(cases, ks, how, lambda o, k: all_at_k(len(o), round(sum(o)), k)),
        turns=sum(trajectory.turns for trajectory in scored) / len(scored),
        truncated=sum(trajectory.stop.is_truncated for trajectory in scored) / len(scored),
    )


def _mean(values: Sequence[Sequence[float]]) -> float:
    return sum(map(sum, values)) / sum(map(len, values))


def _widened(seen: Estimate, worst: Estimate | None = None, best: Estimate | None = None) -> Estimate:
    """The estimate over what was scored, in an interval that allows for what was lost."""
    if worst is None or best is None:
        return seen
    lows = [one for case in (seen, worst) for one in (case.value, case.low) if one is not None]
    highs = [one for case in (seen, best) for one in (case.value, case.high) if one is not None]
    return Estimate(seen.value, min(lows), max(highs))


def _pooled(
    values: Sequence[Sequence[float]], how: SummaryOptions, within: tuple[float, float] | None
) -> Estimate:
    """The mean over all episodes, with an interval over tasks."""
    tops, counts = [sum(task) for task in values], [len(task) for task in values]
    return mean_interval(tops, counts, level=how.level, within=within)


def _at_k(
    cases: Sequence[Sequence[Sequence[float]]],
    ks: Sequence[int],
    how: SummaryOptions,
    estimate: Callable[[Sequence[float], int], float],
) -> dict[int, Estimate]:
    """The mean over tasks for each k, over those with at least k scored attempts.

    `cases` are the outcomes as scored, and where any were lost, with those counted as 0 and as 1.
    """
    found: dict[int, Estimate] = {}
    for k in ks:
        values = [[estimate(task, k) for task in case if len(task) >= k] for case in cases]
        if values[0]:
            found[k] = _widened(*(mean_interval(one, level=how.level, within=_SHARE) for one in values))
    return found


@dataclass(frozen=True, slots=True)
class _Rate:
    """The share of successes at a task, exactly, and what it would be with lost attempts as 0 and as 1."""

    seen: Fraction
    worst: Fraction
    best: Fraction


def _rates(groups: Sequence[Group], how: SummaryOptions) -> dict[str, _Rate | None]:
    """The rates by task; None for a task without a scored attempt."""
    return {task: _rate(attempts, how) for task, attempts in _by_task(groups).items()}


def _rate(attempts: Sequence[Trajectory], how: SummaryOptions) -> _Rate | None:
    scored = [one for one in attempts if one.is_trainable]
    if not scored:
        return None
    won, lost = sum(map(how.success, scored)), sum(map(is_lost, attempts))
    everything = len(scored) + lost
    return _Rate(Fraction(won, len(scored)), Fraction(won, everything), Fraction(won + lost, everything))


def _comparison(
    name: str,
    first: Mapping[str, _Rate | None],
    second: Mapping[str, _Rate | None],
    how: SummaryOptions,
) -> Comparison | None:
    pairs = [
        (ours, theirs)
        for task, ours in first.items()
        if ours is not None and (theirs := second.get(task)) is not None
    ]
    if not pairs:
        return None
    mine, others = [a.seen for a, _ in pairs], [b.seen for _, b in pairs]
    test = paired_test(mine, others, level=how.level)
    if any(one.worst != one.best for pair in pairs for one in pair):
        worst, best = (
            mean_interval([float(d) for d in differences], level=how.level)
            for differences in (
                [a.worst - b.best for a, b in pairs],
                [a.best - b.worst for a, b in pairs],
            )
        )
        test = replace(test, difference=_widened(test.difference, worst, best))
    return Comparison(
        subtask=name,
        tasks=len(pairs),
        unpaired=len(first.keys() | second.keys()) - len(pairs),
        first=float(sum(mine) / len(mine)),
        second=float(sum(others) / len(others)),
        test=test,
    )
