"""A safe with three dials: find each dial's number from what its answers leave, then open the door.

Small enough to learn on a laptop's CPU in minutes, and still a real agent's task: every call depends on the
results of those before it, the door must not be tried too early, and turns are scarce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ludus.core.failures import ToolFault
from ludus.core.messages import ToolResult
from ludus.core.task import Task
from ludus.envs.env import Env
from ludus.tools import tool

Dial = Literal["red", "green", "blue"]
DIALS: tuple[Dial, ...] = ("red", "green", "blue")
NUMBERS = 10
"""Each dial shows a number from 0 to 9."""


class Safe(Env):
    """One safe. A task gives the three numbers as `envs = {"safe": {"combination": [3, 1, 4]}}`."""

    def __init__(self) -> None:
        self.combination: dict[Dial, int] = {}
        self.left: dict[Dial, tuple[int, int]] = {}
        """The numbers that each dial's answers have not ruled out, as (lowest, highest)."""
        self.found: set[Dial] = set()
        self.opened = False

    async def reset(self, task: Task, combination: Sequence[int]) -> None:
        self.combination = dict(zip(DIALS, combination, strict=True))
        self.left = dict.fromkeys(DIALS, (0, NUMBERS - 1))
        self.found = set()
        self.opened = False

    @tool
    async def turn(self, dial: Dial, to: int) -> str:
        """Turn a dial to a number.

        Args:
            dial: Which dial.
            to: The number, from 0 to 9.
        """
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
        self.opened = len(self.found) == len(DIALS)
        return ToolResult("the door opens" if self.opened else "it stays shut", terminated=True)
