"""A world: fetch a box from a numbered shelf of a depot."""

from __future__ import annotations

from collections.abc import Generator

from ludus.core import Task, ToolCall
from ludus.core.messages import ToolResult
from ludus.envs import Env, World
from ludus.rewards import reward
from ludus.tools import tool


class Depot(Env):
    """Fetch a box from a numbered shelf."""

    deterministic = True

    def reset(self, task: Task, shelf: int) -> str:
        self.shelf, self.fetched = shelf, False
        return f"The box is on shelf {shelf}."

    @tool
    def fetch(self, shelf: int) -> ToolResult:
        """Fetch what lies on a shelf.

        Args:
            shelf: Its number.
        """
        if self.fetched:
            return ToolResult("The box is fetched.", terminated=True)
        self.fetched = shelf == self.shelf
        return ToolResult("the box" if self.fetched else "nothing", terminated=self.fetched)


@reward
def fetched(env: Depot) -> float:
    """1 when the box is fetched."""
    return float(env.fetched)


def training_tasks() -> list[Task]:
    return [_task(shelf) for shelf in range(6)]


def held_out_tasks() -> list[Task]:
    return [_task(shelf) for shelf in range(6, 9)]


def _task(shelf: int) -> Task:
    return Task.of("Fetch the box.", id=f"depot-{shelf}", envs={"depot": {"shelf": shelf}})


def expert(task: Task) -> Generator[ToolCall, str, None]:
    yield ToolCall("fetch", {"shelf": task.envs["depot"]["shelf"]})


WORLD = World(
    "depot",
    "Fetch a box from a numbered shelf.",
    env=Depot,
    rewards=(fetched,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    max_turns=4,
)
