"""Environments made of generator functions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

from ludus.core.task import Task
from ludus.envs import Env, Step


@Env.of
def guess(task: Task, secret: int = 5) -> Generator[str | Step, str, float]:
    """Guess a number.

    Args:
        action: A number from 1 to 9.
    """
    tries = 1
    action = yield "Which number?"
    while action != str(secret):
        tries += 1
        if not action.isdecimal():
            action = yield Step("That is no number.", reward=-0.1)
        else:
            action = yield "higher" if int(action) < secret else "lower"
    return 1 / tries


closed: list[str] = []


@Env.of
async def echo(task: Task) -> AsyncGenerator[str | Step, str]:
    """Say something."""
    try:
        action = yield f"task {task.id}"
        while action != "end":
            action = yield action
        yield Step("bye", reward=1.0, terminated=True)
    finally:
        closed.append(task.id)
