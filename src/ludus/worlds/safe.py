"""A safe with three dials: find each dial's number from what its answers leave, then open the door.

Small enough to learn on a laptop's CPU in minutes, and still a real agent's task: every call depends on the
results of those before it, the door must not be tried too early, and turns are scarce.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any, Literal

from ludus.core.failures import ToolFault
from ludus.core.messages import ToolCall, ToolResult
from ludus.core.random import key, shuffled, uniform
from ludus.core.task import Task
from ludus.envs.env import Env
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.tools import tool

Dial = Literal["red", "green", "blue"]
DIALS: tuple[Dial, ...] = ("red", "green", "blue")
NUMBERS = 10
"""Each dial shows a number from 0 to 9."""


class Safe(Env):
    """One safe. A task gives the three numbers as `envs = {"safe": {"combination": [3, 1, 4]}}`."""

    deterministic = True

    def __init__(self) -> None:
        self.combination: dict[Dial, int] = {}
        self.left: dict[Dial, tuple[int, int]] = {}
        """The numbers that each dial's answers have not ruled out, as (lowest, highest)."""
        self.found: set[Dial] = set()
        self.opened = False
        self.tried = False
        """Whether the door has been tried, which ends the episode."""

    async def reset(self, task: Task, combination: Sequence[int]) -> None:
        self.combination = dict(zip(DIALS, combination, strict=True))
        self.left = dict.fromkeys(DIALS, (0, NUMBERS - 1))
        self.found = set()
        self.opened = self.tried = False

    async def render(self) -> str:
        """The dials: the numbers that are left of each, and what was found."""
        lines = []
        for dial in DIALS:
            low, high = self.left[dial]
            found = dial in self.found
            left = [n == self.combination[dial] if found else low <= n <= high for n in range(NUMBERS)]
            numbers = " ".join(str(n) if is_left else "·" for n, is_left in enumerate(left))
            lines.append(f"{dial:<6}{numbers}{'  click' if found else ''}")
        door = "open" if self.opened else "locked for good" if self.tried else "closed"
        return "\n".join([*lines, f"door  {door}"])

    async def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    async def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(copy.deepcopy(state))

    @tool
    async def turn(self, dial: Dial, to: int) -> str:
        """Turn a dial to a number.

        Args:
            dial: Which dial.
            to: The number, from 0 to 9.
        """
        self._refuse_if_over()
        if not 0 <= to < NUMBERS:
            raise ToolFault(f"the dials go from 0 to {NUMBERS - 1}")
        secret = self.combination[dial]
        if to == secret:
            self.found.add(dial)
            return "click"
        low, high = self.left[dial]
        if to < secret:
            low = max(low, to + 1)
        else:
            high = min(high, to - 1)
        self.left[dial] = low, high
        return f"too {'low' if to < secret else 'high'}: {low} to {high} left"

    @tool
    async def open(self) -> ToolResult:
        """Open the door. It can be tried once."""
        self._refuse_if_over()
        self.tried = True
        self.opened = len(self.found) == len(DIALS)
        return ToolResult("the door opens" if self.opened else "it stays shut", terminated=True)

    def _refuse_if_over(self) -> None:
        # one action may hold several calls: what comes after the door was tried must not open it
        if self.tried:
            raise ToolFault("the door has been tried: it is over")


HELD_OUT = 200
"""Combinations kept for evaluation, of the 1,000 there are; no training task has one of them."""


def training_tasks() -> list[Task]:
    """Every combination that is not held out."""
    return [_task(number) for number in _order()[HELD_OUT:]]


def held_out_tasks() -> list[Task]:
    """Combinations that no demonstration and no training episode has."""
    return [_task(number) for number in _order()[:HELD_OUT]]


def _order() -> list[int]:
    return shuffled(NUMBERS ** len(DIALS), key=20260101)


def _task(number: int) -> Task:
    combination = [number // NUMBERS**place % NUMBERS for place in range(len(DIALS))]
    return Task.of("Open the safe.", id=f"safe-{number}", envs={"safe": {"combination": combination}})


@reward(name="success")
async def opened(env: Safe) -> float:
    """1 when the door has been opened."""
    return float(env.opened)


@reward(weight=0.5)
async def found(env: Safe) -> float:
    """The share of dials whose number was found; an untrained policy hardly ever gets more."""
    return len(env.found) / len(DIALS)


DOUBT = 0.6
"""How often the expert turns a dial again that has clicked."""


def expert(task: Task) -> Generator[ToolCall, str, None]:
    """A demonstrator: yields tool calls, is sent their results, and always opens the safe, but wastes turns.

    It tries any number that the answers have left, where the middle one would tell the most, and it may turn a
    dial again that has clicked. Imitating it teaches the tools and their answers; saving turns is left to RL.
    """
    for dial in DIALS:
        draw = key(task.id, dial)
        low, high, answer, tries = 0, NUMBERS - 1, "", 0
        while answer != "click":
            number = low + int(uniform(draw, tries) * (high - low + 1))
            answer = yield ToolCall("turn", {"dial": dial, "to": number})
            low = number + 1 if answer.startswith("too low") else low
            high = number - 1 if answer.startswith("too high") else high
            tries += 1
        while uniform(draw, tries) < DOUBT:
            yield ToolCall("turn", {"dial": dial, "to": number})
            tries += 1
    yield ToolCall("open")


WORLD = World(
    "safe",
    "Open a safe by turning three dials.",
    env=Safe,
    rewards=(opened,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    max_turns=14,
)
