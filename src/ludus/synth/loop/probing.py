"""Greedy capability probing (GCP): where a model fails, by capability."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.core.task import Task
from ludus.core.trajectory import Group, is_success

NO_CAPABILITY = "all"
"""The capability of tasks that name none."""


@dataclass(frozen=True, slots=True)
class CapabilityRate:
    """How a capability was met."""

    capability: str
    episodes: int
    failures: int

    @property
    def failure_rate(self) -> float:
        return self.failures / self.episodes if self.episodes else 0.0


def capability_of_task(task: Task, by: str) -> str:
    """What a task is practice in: what its metadata says under `by`."""
    found = task.metadata.get(by)
    return NO_CAPABILITY if found is None else str(found)


def capability_rates(groups: Sequence[Group], by: str) -> dict[str, CapabilityRate]:
    """Failures by capability. Episodes that failed through our fault count for nothing."""
    episodes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for group in groups:
        name = capability_of_task(group.task, by)
        episodes[name] += len(group.trainable)
        failures[name] += sum(not is_success(one) for one in group.trainable)
    return {name: CapabilityRate(name, episodes[name], failures[name]) for name in sorted(episodes)}
