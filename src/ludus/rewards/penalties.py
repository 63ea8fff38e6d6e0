"""Penalties that are added to what an answer earns: for turns, calls, time, faults and waste.

Each is a reward that is never positive, so that a recipe adds the ones it needs and the parts stay visible::

    rewards = [
        { reward = "exact_match", name = "success" },
        { reward = "turn_penalty", price = 0.1, budget = 8 },
        { reward = "call_penalty", price = 0.05, tools = ["search"] },
    ]

Begin without any, and add one for each failure that is seen. Name the reward that decides `success`: penalties
take the total of a right answer below 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ludus.core.failures import ConfigError, Fault
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.compose import made_calls, tool_names
from ludus.rewards.conduct import call_records, needless_calls, repeated_calls
from ludus.rewards.reward import reward
from ludus.rewards.scores import EXECUTION, Parts, checked_name, checked_weight


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


class TimePenalty:
    """- price * (seconds - free) / budget, at most `price`: slow queries cost.

    The seconds are those in tools, and those in which the rewards beside it (`sql_match`, `unit_tests`,
    `programs`) ran the answer's code or query. Wall time is noisy: leave `free` seconds that any good answer
    needs, and keep the price small.
    """

    uses_envs = False
    runs_last = True

    def __init__(
        self,
        *,
        price: float = 0.1,
        budget: float = 10.0,
        free: float = 0.0,
        name: str = "time_penalty",
        weight: float = 1.0,
    ) -> None:
        self.name, self.weight = checked_name(name), checked_weight(weight, name)
        self.price, self.budget = _positive(price, "price"), _positive(budget, "budget")
        self.free = free

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
