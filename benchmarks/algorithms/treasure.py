"""A small multi-turn task for comparing algorithms: a treasure in a field, found by digging.

Each dig answers with the part of the field in which the treasure can still be. The expert digs anywhere in it;
its middle tells the most, which is left for reinforcement learning to find out.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Any

import ludus
from ludus.core import key, shuffled, uniform
from ludus.envs import Observation

SIZE = 10
HELD_OUT = 30
ROUNDS = 6


class Field(ludus.Env):
    """A field of 10 by 10 places."""

    async def reset(self, task: ludus.Task) -> Observation:
        place = task.envs["field"]["place"]
        self.at = (place // SIZE, place % SIZE)
        self.left = [[0, SIZE - 1], [0, SIZE - 1]]
        self.found = False
        return Observation("")

    def tools(self) -> Sequence[Any]:
        return [dig]


@ludus.tool
async def dig(env: Field, x: int, y: int) -> ludus.ToolResult:
    """Dig at a place."""
    for said, at, left in zip((x, y), env.at, env.left, strict=True):
        left[0] = max(left[0], said + 1) if said < at else left[0] if said > at else at
        left[1] = min(left[1], said - 1) if said > at else left[1] if said < at else at
    env.found = (x, y) == env.at
    if env.found:
        return ludus.ToolResult("here", terminated=True)
    return ludus.ToolResult(" ".join(f"{low}-{high}" for low, high in env.left))


@ludus.reward(name="success")
async def found(env: Field) -> float:
    """1 when the treasure was dug up."""
    return float(env.found)


def training_tasks() -> list[ludus.Task]:
    """The places that are not held out, each several times: the expert digs differently each time."""
    places = shuffled(SIZE * SIZE, key=1)[HELD_OUT:]
    return [_task(place, number) for number in range(ROUNDS) for place in places]


def held_out_tasks() -> list[ludus.Task]:
    """Places where no demonstration and no training episode finds it."""
    return [_task(place, 0) for place in shuffled(SIZE * SIZE, key=1)[:HELD_OUT]]


def _task(place: int, number: int) -> ludus.Task:
    return ludus.Task.of(
        "Find the treasure.", id=f"field-{place}-{number}", envs={"field": {"place": place}}
    )


def expert(task: ludus.Task) -> Generator[ludus.ToolCall | str, str, None]:
    """Digs anywhere in what is left, until the treasure is there."""
    left, turn = [(0, SIZE - 1), (0, SIZE - 1)], 0
    while True:
        draws = [uniform(key(task.id, axis), turn) for axis in (0, 1)]
        x, y = (
            low + int(draw * (high - low + 1)) for draw, (low, high) in zip(draws, left, strict=True)
        )
        heard = yield ludus.ToolCall("dig", {"x": x, "y": y})
        if "here" in heard:
            return
        left = [(int(low), int(high)) for low, high in re.findall(r"(\d)-(\d)", heard)]
        turn += 1
