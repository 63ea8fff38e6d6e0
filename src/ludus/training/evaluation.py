"""Measuring a policy on tasks it does not learn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ludus.core.generation import Sampling
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.trajectory import Group, Trajectory
from ludus.observe import rollout_metrics
from ludus.rollouts.runner import Rollout
from ludus.training.evaluating.summary import Comparison, Statistics, Summary, compare, summarise
from ludus.training.task_sets import TaskSet, seed_of_set

TASK_SET = "task_set"
"""The metadata key under which groups of several task sets have their set's name."""
_PER_SET = ("success", "reward", "turns")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured, and the episodes it was measured on."""

    metrics: dict[str, float]
    groups: list[Group]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def summary(self, how: Statistics | None = None) -> Summary:
        """Success, pass@k, average@k and reward over all tasks, with intervals."""
        return summarise(self.groups, how)[0]

    def by_subtask(self, by: str, how: Statistics | None = None) -> dict[str, Summary]:
        """The same for each sub-task: tasks are told apart by what their metadata has under `by`."""
        _, *parts = summarise(self.groups, replace(how or Statistics(), by=by))
        return {part.subtask: part for part in parts}

    def against(self, other: Evaluation, how: Statistics | None = None) -> Comparison | None:
        """This one minus another one on the same tasks; None when they share no scored task."""
        found = compare(self.groups, other.groups, how)
        return found[0] if found else None


def in_order(groups: Sequence[Group], task_ids: Sequence[str]) -> list[Group]:
    """Groups in the order of their tasks: which one finished first must not decide anything."""
    place = {task_id: number for number, task_id in enumerate(task_ids)}
    return sorted(groups, key=lambda group: (place[group.task.id], group.trajectories[0].attempt))


async def measure(
    rollout: Rollout, tasks: Sequence[Task], *, attempts: int, sampling: Sampling, seed: int
) -> Evaluation:
    """Play every task `attempts` times. The same seed gives the same draws before and after training."""
    playing = replace(rollout, attempts=attempts, sampling=sampling)
    groups = [group async for group in playing.groups(tasks, evaluation_seed(seed))]
    return evaluation_of(groups, tasks)


async def measure_sets(
    chosen: Sequence[tuple[TaskSet, Sequence[Task]]], *, attempts: int, sampling: Sampling, seed: int
) -> Evaluation:
    """Play these tasks of these sets, one set after the other."""
    parts: dict[str, Evaluation] = {}
    for number, (one, tasks) in enumerate(chosen):
        own = seed_of_set(seed, number, one.name)
        parts[one.name] = await measure(
            one.rollout, tasks, attempts=attempts, sampling=sampling, seed=own
        )
    return joined(parts)


def joined(parts: Mapping[str, Evaluation]) -> Evaluation:
    """The evaluations of several task sets as one, with the numbers of each under sets/NAME/...

    Sets may have tasks of the same id, which are not attempts at one task: groups are told apart by the
    names of their sets. Their trajectories stay as they are.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    groups = [_apart(group, name) for name, part in parts.items() for group in part.groups]
    metrics = rollout_metrics(groups)
    for name, part in parts.items():
        metrics |= {f"sets/{name}/{n}": part.metrics[n] for n in _PER_SET if n in part.metrics}
    return Evaluation(metrics, groups)


def _apart(group: Group, name: str) -> Group:
    task = group.task
    named = replace(task, id=f"{name}/{task.id}", metadata={**task.metadata, TASK_SET: name})
    return Group(named, group.trajectories)


def evaluation_of(groups: Sequence[Group], tasks: Sequence[Task]) -> Evaluation:
    """The evaluation that these groups are, put into the order of the tasks."""
    ordered = in_order(groups, [task.id for task in tasks])
    return Evaluation(rollout_metrics(ordered), ordered)


def evaluation_seed(seed: int) -> int:
    """The key of an evaluation's draws, apart from those of training with the same seed."""
    return key("evaluation", seed)
