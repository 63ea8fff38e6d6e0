"""Rewards for how an episode was played: expected calls, completion with process and efficiency, penalties; and
group rewards: ranks within a group, and bonuses that make a policy try its tools.

A penalty is a reward that is never positive, so that a recipe adds the ones it needs and the parts stay
visible. Name the reward that decides `success`: penalties take the total of a right answer below 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from ludus.core.failures import ConfigError, Fault
from ludus.core.task import Task
from ludus.core.trajectory import Group, Reward, Trajectory
from ludus.rewards.compose import Composite, Envs, Scored, weighted_score
from ludus.rewards.conduct import (
    Unit,
    amount_used,
    call_records,
    distinct_thoughts_share,
    effective_share,
    good_calls,
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


@dataclass(kw_only=True, eq=False)
class Ranking(OptionsReward):
    """From `low` for the last to `high` for the first, evenly spaced; equals share the average.

    Ranked by the total, or by the part called `by` (give that one weight 0 to rank by it alone). With
    `tie_breaker`, equals that took fewer turns, calls or tokens rank higher. An attempt without the part
    ranks below all that have it. A lone attempt gets the middle, as do all when they are equal.
    """

    by: str | None = None
    tie_breaker: Unit | None = None
    low: float = 0.0
    high: float = 1.0
    name: str = "ranking"

    async def score_group(self, group: Group) -> list[float]:
        keys = [self._key(trajectory) for trajectory in group.trajectories]
        return [self.low + (self.high - self.low) * rank for rank in normalised_ranks(keys)]

    def _key(self, trajectory: Trajectory) -> tuple[float, float]:
        value = trajectory.reward if self.by is None else trajectory.rewards.get(self.by)
        used = 0 if self.tie_breaker is None else amount_used(trajectory, self.tie_breaker)
        return (float("-inf") if value is None else value, -used)


def normalised_ranks(keys: Sequence[tuple[float, ...]]) -> list[float]:
    """0 for the lowest key, 1 for the highest, equal keys averaged; 0.5 for a single one."""
    if len(keys) < 2:
        return [0.5] * len(keys)
    return [rank / (len(keys) - 1) for rank in average_ranks(keys)]


def average_ranks(keys: Sequence[Any]) -> list[float]:
    """The places of keys in their order, from 0; equal ones have the average of theirs."""
    ordered = sorted(keys)
    first = {key: i for i, key in reversed(list(enumerate(ordered)))}
    last = {key: i for i, key in enumerate(ordered)}
    return [(first[key] + last[key]) / 2 for key in keys]


@dataclass(kw_only=True, eq=False)
class Curiosity(OptionsReward):
    """VerlTool's curiosity (F.4, equations 9 to 11): a bonus for tool use where a group seldom uses tools.

    For an attempt y at a task x, beside its other rewards::

        alpha * max(H - RaPR(x), 0) * [y calls a tool] + beta * min(N - n(y), 0)

    RaPR(x) is the share of the attempts at x that call a tool, n(y) the number of calls in y. So the fewer
    attempts use tools, the larger the bonus, and 0 once a share H does (`min_rate`); calls beyond N
    (`max_calls`) cost beta each. Counted are the calls of `tools`, or of any tool, also those that a tool
    answered with an error. The paper has H = 0.3, N = 1, alpha = 0.5, beta = 0.05.

    The penalty can take a right answer below 1: name a reward "success" for metrics to go by.
    """

    tools: Collection[str] | None = None
    alpha: float = 0.5
    beta: float = 0.05
    min_rate: float = 0.3
    max_calls: int = 1
    name: str = "curiosity"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_rate <= 1 or self.max_calls < 0 or self.alpha < 0 or self.beta < 0:
            raise ConfigError(
                f"{self.name!r}: min_rate is between 0 and 1, and alpha, beta and max_calls are at least 0"
            )
        self.tools = tool_names(self.tools, self.name)

    async def score_group(self, group: Group) -> list[float]:
        calls_G = [len(made_calls(trajectory, self.tools)) for trajectory in group.trajectories]
        rate = sum(count > 0 for count in calls_G) / len(calls_G)
        bonus = self.alpha * max(self.min_rate - rate, 0.0)
        return [bonus * (n > 0) + self.beta * min(self.max_calls - n, 0) for n in calls_G]


@dataclass(kw_only=True, eq=False)
class CountBonus(OptionsReward):
    """For each different tool that an attempt used, 1/sqrt(1 + n), where n counts its recent users.

    A count-based bonus, as in Bellemare et al., "Unifying count-based exploration and intrinsic
    motivation" (2016). n is the number of attempts that used the tool, each older group counting
    `decay` times as much as the next. Calling a tool twice counts once, and only calls without any fault
    count, so that inventing names earns nothing. All attempts of a group are scored by the same counts.

    The counts are state: save `state_dict()` with a checkpoint. They depend on the order in which
    groups finish, so that a run with several groups in flight repeats itself only if that order does.
    """

    tools: Collection[str] | None = None
    decay: float = 0.99
    name: str = "count_bonus"
    weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1:
            raise ConfigError(f"{self.name!r}: decay must be above 0 and at most 1, not {self.decay}")
        self.tools = tool_names(self.tools, self.name)
        self.counts: dict[str, float] = {}

    async def score_group(self, group: Group) -> list[float]:
        used = [self._used(trajectory) for trajectory in group.trajectories]
        scores = [math.fsum(self.bonus(name) for name in sorted(names)) for names in used]
        self.counts = {name: count * self.decay for name, count in self.counts.items()}
        for names in used:
            for name in names:
                self.counts[name] = self.counts.get(name, 0.0) + 1.0
        return scores

    def _used(self, trajectory: Trajectory) -> set[str]:
        names = {call.name for call in good_calls(trajectory)}
        return names if self.tools is None else names.intersection(self.tools)

    def bonus(self, tool: str) -> float:
        """The bonus for using this tool now."""
        return 1.0 / math.sqrt(1.0 + self.counts.get(tool, 0.0))

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = state.get("counts")
        if not isinstance(counts, Mapping):
            raise ValueError(f"this is not a state of {self.name!r}: it has no counts")
        self.counts = {
            str(name): number(count, f"the count of {name!r}") for name, count in counts.items()
        }
