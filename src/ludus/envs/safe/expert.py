"""A demonstrator who knows the rules and always gets there, but is careful rather than quick.

It never tries a number that the answers have ruled out; among the others it picks any, where the middle one
would tell the most. And a dial that has clicked it turns again, until it feels sure. Imitating it teaches
how to call the tools and what the answers mean. That turns are scarce is left for reinforcement
learning to find out.
"""

from __future__ import annotations

from collections.abc import Generator

from ludus.core.messages import ToolCall
from ludus.core.random import key, uniform
from ludus.core.task import Task
from ludus.envs.safe.env import DIALS, NUMBERS

DOUBT = 0.6
"""How often it is not sure yet that a dial has clicked."""


def expert(task: Task) -> Generator[ToolCall, str, None]:
    """The calls it makes on a task; it is sent what each one gave."""
    for dial in DIALS:
        mood = key(task.id, dial)
        low, high, heard, tries = 0, NUMBERS - 1, "", 0
        while heard != "click":
            number = low + int(uniform(mood, tries) * (high - low + 1))
            heard = yield ToolCall("turn", {"dial": dial, "to": number})
            low = number + 1 if heard.startswith("too low") else low
            high = number - 1 if heard.startswith("too high") else high
            tries += 1
        while uniform(mood, tries) < DOUBT:
            yield ToolCall("turn", {"dial": dial, "to": number})
            tries += 1
    yield ToolCall("open")
