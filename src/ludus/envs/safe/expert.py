"""A demonstrator who knows the rules and always gets there, but wastes turns.

It tries the numbers of a dial in a random order, never the same one twice, and does not draw the conclusion
that "too low" rules out everything below. Imitating it teaches how to call the tools and when to
open the door; that each answer rules out a part of the range is left for reinforcement learning to find.
"""

from __future__ import annotations

from collections.abc import Generator

from ludus.core.messages import ToolCall
from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.envs.safe.env import DIALS, NUMBERS


def expert(task: Task) -> Generator[ToolCall, str, None]:
    """The calls it makes on a task; it is sent what each one gave."""
    for dial in DIALS:
        for number in shuffled(NUMBERS, key(task.id, dial)):
            heard = yield ToolCall("turn", {"dial": dial, "to": number})
            if heard == "click":
                break
    yield ToolCall("open")
