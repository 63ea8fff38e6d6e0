"""A treasure is hidden in the agent's Python session; it finds it by running code there, turn after turn.

The session starts with a function `ask(x, y)`, which remembers what was asked and says where the treasure can
still be. The agent calls the tool `python` with code such as `ask(5, 5)` and reads the value. The expert asks
for any place that is left; that its middle tells the most is left for reinforcement learning to find out.
What is rewarded is read from the calls that were made, not from what the session printed: code in a session can
print anything.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import ludus
from ludus.core import key, shuffled, uniform

SIZE = 10
HELD_OUT = 20
ROUNDS = 6
"""How often the treasure is at each place: the expert asks differently each time."""
SETUP = """
_left = [[0, 9], [0, 9]]

def ask(x, y, _at={place}):
    for said, at, left in zip((x, y), _at, _left):
        left[0] = max(left[0], said + 1) if said < at else left[0] if said > at else at
        left[1] = min(left[1], said - 1) if said > at else left[1] if said < at else at
    return "here" if (x, y) == _at else " ".join(f"{{low}}-{{high}}" for low, high in _left)
"""


def training_tasks() -> list[ludus.Task]:
    """The places that are not held out."""
    places = shuffled(SIZE * SIZE, key=1)[HELD_OUT:]
    return [_task(place, number) for number in range(ROUNDS) for place in places]


def held_out_tasks() -> list[ludus.Task]:
    """Places where no demonstration and no training episode finds it."""
    return [_task(place, 0) for place in shuffled(SIZE * SIZE, key=1)[:HELD_OUT]]


def _task(place: int, number: int) -> ludus.Task:
    at = divmod(place, SIZE)
    return ludus.Task.of(
        "Find the treasure.",
        f"ask({at[0]}, {at[1]})",
        id=f"hunt-{place}-{number}",
        sandbox={"setup": SETUP.format(place=at)},
    )


def expert(task: ludus.Task) -> Generator[ludus.ToolCall | str, str, None]:
    """Asks for any possible place until the treasure is there."""
    left, heard, turn = [(0, SIZE - 1), (0, SIZE - 1)], "", 0
    while "here" not in heard:
        draws = [uniform(key(task.id, axis), turn) for axis in (0, 1)]
        at = [low + int(draw * (high - low + 1)) for draw, (low, high) in zip(draws, left, strict=True)]
        heard = yield ludus.ToolCall("python", {"code": f"ask({at[0]}, {at[1]})"})
        left = [(int(low), int(high)) for low, high in re.findall(r"(\d)-(\d)", heard)] or left
        turn += 1
    yield "done"


@ludus.reward(name="success")
async def found(trajectory: ludus.Trajectory, target: str) -> float:
    """1 when the place was asked for."""
    return float(any(call.arguments.get("code") == target for call in trajectory.calls))
