"""Measuring a policy on tasks it does not learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ludus.core.generation import Sampling
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.trajectory import Group, Trajectory
from ludus.observe import rollout_metrics
from ludus.rollouts.runner import Rollout


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured, and the episodes it was measured on."""

    metrics: dict[str, float]
    groups: list[Group]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def in_order(groups: Sequence[Group], task_ids: Sequence[str]) -> list[Group]:
    """Groups in the order of their tasks: which one finished first must not decide anything."""
    place = {task_id: number for number, task_id in enumerate(task_ids)}
    return sorted(groups, key=lambda group: (place[group.task.id], group.trajectories[0].attempt))


async def measure(
    rollout: Rollout, tasks: Sequence[Task], *, attempts: int, sampling: Sampling, seed: int
) -> Evaluation:
    """Play every task `attempts` times. The same seed gives the same draws before and after training."""
    playing = replace(rollout, attempts=attempts, sampling=sampling)
    groups = [group async for group in playing.groups(tasks, key("evaluation", seed))]
    groups = in_order(groups, [task.id for task in tasks])
    return Evaluation(rollout_metrics(groups), groups)
