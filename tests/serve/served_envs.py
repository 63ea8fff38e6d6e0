"""Environments for servers, and a tool that needs one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Generator

from ludus.core import Task, ToolFault, ToolResult
from ludus.core.messages import Media
from ludus.envs import Env, Observation, Step
from ludus.tools import tool

IMAGE = b"\x89PNG not really"


def image() -> Media:
    return Media("image/png", hashlib.sha256(IMAGE).hexdigest(), IMAGE)


class Counter(Env):
    """Counts to a number; it shows images, and does what its actions say to the process it lives in."""

    step_rewards = "last"

    def __init__(self) -> None:
        self.count = 0
        self.words: set[str] = set()
        self.thing = object()

    def reset(self, task: Task, to: int) -> Observation:
        self.count, self.to = 0, to
        self.words = set()
        return Observation(f"Count to {to} ({task.id}).", (image(),))

    @property
    def done(self) -> bool:
        return self.count >= self.to

    def available_actions(self) -> list[str]:
        return ["on", "look", "é"]

    def step(self, action: str) -> Step:
        """Count.

        Args:
            action: on, or look.
        """
        if self.done:
            return Step("It is over.", terminated=True)
        if action == "on":
            self.count += 1
        if action == "process":
            return Step(str(os.getpid()))
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "hang":
            time.sleep(60)
        return Step(str(self.count), reward=self.count / self.to, terminated=self.done)

    @tool
    def say(self, word: str) -> ToolResult:
        """Say a word.

        Args:
            word: Which.
        """
        if word == "bad":
            raise ToolFault("that is no word")
        self.words.add(word)
        return ToolResult(f"{len(self.words)} words", reward=0.0, media=(image(),))


class Shop(Env):
    def reset(self, task: Task) -> str:
        self.bought: list[str] = []
        return "Welcome."


@tool(env=Shop)
def buy(env: Shop, title: str) -> str:
    """Buy a book.

    Args:
        title: Its title.
    """
    env.bought.append(title)
    return ", ".join(env.bought)


@tool(timeout=0.3)
async def doze() -> str:
    """Sleep."""
    await asyncio.sleep(30)
    return "awake"


@tool(env=Shop, timeout=0.3)
async def doze_in_a_shop(env: Shop) -> str:
    """Sleep there."""
    await asyncio.sleep(30)
    return "awake"


@tool
def wants_any(env: Env) -> str:
    """Needs an environment, and names none."""
    return type(env).__name__


def expert(task: Task) -> Generator[object, str, None]:
    from ludus.core import ToolCall

    while True:
        yield ToolCall("step", {"action": "on"})
