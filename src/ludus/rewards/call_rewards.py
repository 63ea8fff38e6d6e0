"""Rewards for how an episode was played: expected calls, completion with process and efficiency, penalties.

A penalty is a reward that is never positive, so that a recipe adds the ones it needs and the parts stay
visible. Name the reward that decides `success`: penalties take the total of a right answer below 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from ludus.core.failures import ConfigError, Fault
from ludus.core.task import Task
from ludus.core.trajectory import Reward, Trajectory
from ludus.rewards.compose import Composite, Envs, Scored, weighted_score
from ludus.rewards.conduct import (
    Unit,
    amount_used,
    call_records,
    distinct_thoughts_share,
    effective_share,
    made_calls,
    needless_calls,
    recovery_share,
    repeated_calls,
    tool_names,
)
from ludus.rewards.reward import reward
from ludus.rewards.scorer import evaluate_all
from ludus.rewards.scores import EXECUTION, OptionsReward, Parts, merge, number


@reward
def expected_calls(trajectory: Trajectory, target: Any) -> float:
    """1 if the calls are those of the target, `[{"name": ..., "arguments": {...}}]`, in order and no others."""
    made = [(call.name, _plain(call.arguments)) for call in trajectory.calls]
    return float(made == calls_of(target))


def calls_of(target: Any) -> list[tuple[str, Any]]:
    """The calls of a target, to compare; a `ValueError` says what is wrong with it."""
    if not isinstance(target, Sequence) or isinstance(target, str):
        raise ValueError(f'the target is a list of {{"name", "arguments"}}, not {target!r:.80}')
    found = []
    for one in target:
        if not isinstance(one, Mapping) or not isinstance(one.get("name"), str):
            raise ValueError(
                f'a call of the target is {{"name": ..., "arguments": ...}}, not {one!r:.80}'
            )
        found.append((one["name"], _plain(one.get("arguments") or {})))
    return found


def _plain(value: Any) -> Any:
    """Arguments as values that compare as JSON does: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return ("boolean", value) if isinstance(value, bool) else value


@reward
def turn_penalty(trajectory: Trajectory, *, price: float = 0.1, budget: float = 1.0) -> float:
    """- price * turns / budget: with the budget `max_turns`, `price` for using all turns."""
    return -_positive(price, "price") * trajectory.turns / _positive(budget, "budget")


@reward
def call_penalty(
    trajectory: Trajectory, *, price: float = 0.05, tools: list[str] | None = None, free: int = 0
) -> float:
    """- price for each call of these tools beyond the first `free`: Search-R1's - 0.05 * searches."""
    calls = len(made_calls(trajectory, tool_names(tools, "call_penalty")))
    return -_positive(price, "price") * max(0, calls - free)


@dataclass(kw_only=True, eq=False)
class TimePenalty(OptionsReward):
    """- price * (seconds - free) / budget, at most `price`: slow queries cost.

    The seconds are those in tools, and those in which the rewards beside it (`sql_match`, `unit_tests`,
    `programs`) ran the answer's code or query. Wall time is noisy: leave `free` seconds that any good answer
    needs, and keep the price small.
    """

    runs_last = True

    price: float = 0.1
    budget: float = 10.0
    free: float = 0.0
    name: str = "time_penalty"

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self.price, "price")
        _positive(self.budget, "budget")

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        seconds = sum(trajectory.seconds.get(phase, 0.0) for phase in ("tools", EXECUTION))
        spent = (seconds - self.free) / self.budget
        return {self.name: -self.price * min(max(spent, 0.0), 1.0)}


@reward
def fault_penalty(
    trajectory: Trajectory, *, price: float = 0.5, faults: list[str] | None = None, each: bool = False
) -> float:
    """- price for an episode with a fault of these types (malformed_call alone by default), or for each."""
    kinds = {_fault(name) for name in (faults if faults is not None else ["malformed_call"])}
    found = sum(fault in kinds for fault in trajectory.faults)
    return -_positive(price, "price") * (found if each else min(found, 1))


@reward
def repeat_penalty(trajectory: Trajectory, *, price: float = 0.1) -> float:
    """- price for each call that had the same arguments and the same result as an earlier one."""
    return -_positive(price, "price") * repeated_calls(call_records(trajectory))


@reward
def enough_known_penalty(
    trajectory: Trajectory, target: Any, *, price: float = 0.05, tools: list[str] | None = None
) -> float:
    """- price for each call of these tools after a result that already held the target."""
    answers: Collection[Any] = target if isinstance(target, list | tuple) else [target]
    known = [str(answer) for answer in answers if answer is not None]
    needless = needless_calls(call_records(trajectory), known, tool_names(tools, "enough_known_penalty"))
    return -_positive(price, "price") * needless


def _positive(value: float, name: str) -> float:
    if value < 0 or (name == "budget" and value == 0):
        raise ConfigError(f"a penalty's {name} is a positive number, not {value}: the sign is its own")
    return value


def _fault(name: str) -> Fault:
    try:
        return Fault(name)
    except ValueError:
        known = ", ".join(fault.value for fault in Fault)
        raise ConfigError(f"there is no fault {name!r}; there are: {known}") from None


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
