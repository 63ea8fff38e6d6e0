"""Completion, process and efficiency as one reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import Reward, Trajectory
from ludus.rewards.compose import Composite, Envs, Scored, weighted_score
from ludus.rewards.conduct import (
    Unit,
    amount_used,
    call_records,
    distinct_thoughts_share,
    effective_share,
    recovery_share,
)
from ludus.rewards.scorer import evaluate_all
from ludus.rewards.scores import Parts, merge, number

WEIGHTS = {"completion": 0.5, "process": 0.3, "efficiency": 0.2}
EFFECTIVE, COHERENT, RECOVERED = 0.4, 0.3, 0.3
"""The shares of a process."""
EXPECTED: Mapping[str, float] = {"turns": 4, "calls": 4, "tokens": 1024}


@dataclass(kw_only=True, eq=False)
class ThreeDimensional(Composite):
    """0.5 completion + 0.3 process + 0.2 efficiency, each from 0 to 1::

        process    = 0.4 * effective calls / calls + 0.3 * coherence + 0.3 * recovery
        efficiency = the mean of min(1, expected / used) over turns, calls and tokens

    `completion` is a reward. A call is effective without a fault and with a result that was not seen before in
    the episode; recovery is the share of faulty turns that a faultless call followed. `coherence` is a reward
    too, such as a judge's; without one, it is the share of turns that say something new. What was expected is
    the task's `metadata["expected"]`, or `expected`. `weights` are those of the three, and `by_type` those for
    tasks by their `metadata["type"]`.

    An episode without a call has no effective ones; one that answers wrong at once, with no fault, has 0.38.
    With `only_complete`, process and efficiency count in proportion to completion.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"completion", "coherence"})

    completion: Reward = field(kw_only=False)
    coherence: Reward | None = None
    weights: Mapping[str, float] | None = None
    by_type: Mapping[str, Mapping[str, float]] | None = None
    expected: Mapping[str, float] = field(default_factory=lambda: EXPECTED)
    only_complete: bool = False
    name: str = "three_dimensional"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights = _weights(self.weights or WEIGHTS, self.name)
        by_type = (self.by_type or {}).items()
        self._weights_by_type = {kind: _weights(own, self.name) for kind, own in by_type}
        self._expected = _expected(self.expected, self.name)

    async def _score(self, trajectory: Trajectory, task: Task, envs: Envs) -> Scored:
        parts: Parts = {}
        for child, own in zip(
            self.children, await evaluate_all(self.children, trajectory, task, envs), strict=True
        ):
            merge(parts, own, child.name)
        completion = weighted_score(self.completion, parts)
        coherence: float | None = distinct_thoughts_share(trajectory)
        if self.coherence is not None:
            coherence = weighted_score(self.coherence, parts)
        if completion is None or coherence is None:
            return None, parts
        process = (
            EFFECTIVE * effective_share(call_records(trajectory))
            + COHERENT * coherence
            + RECOVERED * recovery_share(trajectory)
        )
        efficiency = self.efficiency(trajectory, task)
        merge(parts, {f"{self.name}_process": process, f"{self.name}_efficiency": efficiency}, self.name)
        weights = self._weights_by_type.get(str(task.metadata.get("type")), self._weights)
        share = min(max(completion, 0.0), 1.0) if self.only_complete else 1.0
        return (
            weights["completion"] * completion
            + share * (weights["process"] * process + weights["efficiency"] * efficiency),
            parts,
        )

    def efficiency(self, trajectory: Trajectory, task: Task) -> float:
        """1 for at most what was expected, falling as more is used."""
        given = task.metadata.get("expected")
        expected = (
            _expected(given, f"the task {task.id}") if isinstance(given, Mapping) else self._expected
        )
        used = {unit: amount_used(trajectory, unit) for unit in expected}
        shares = [min(1.0, most / used[unit]) if used[unit] else 1.0 for unit, most in expected.items()]
        return sum(shares) / len(shares)


def _weights(given: Mapping[str, float], name: str) -> dict[str, float]:
    if given.keys() - WEIGHTS.keys():
        raise ConfigError(
            f"{name!r}: the weights are those of {', '.join(WEIGHTS)}, not of {list(given)}"
        )
    return {one: number(given.get(one, 0.0), f"the weight of {one}") for one in WEIGHTS}


def _expected(given: Mapping[str, Any], name: str) -> dict[Unit, float]:
    units: tuple[Unit, ...] = get_args(Unit)
    if not given or given.keys() - set(units):
        raise ConfigError(f"{name}: what is expected are {', '.join(units)}, not {dict(given)}")
    found = {unit: number(given[unit], f"expected {unit}") for unit in units if unit in given}
    if min(found.values()) <= 0:
        raise ConfigError(f"{name}: what is expected is above 0: {dict(given)}")
    return found
