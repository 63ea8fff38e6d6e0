"""Environments that break when they are told to; their process imports this module and little else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from typing import Any

from ludus.core.failures import ToolFault
from ludus.core.task import Task
from ludus.envs import Env, Step
from ludus.tools import tool


class Odd(Env):
    """Does everything that an environment may do, and breaks when it is told to."""

    isolation = "process"
    show_actions = "tool"
    step_rewards = "max"

    def __init__(self) -> None:
        self.count = 0
        self.hidden = lambda: 1
        self.children: list[Any] = []

    async def reset(self, task: Task, level: int = 0) -> str:
        self.count = level
        return f"level {level}"

    def step(self, action: str) -> Step:
        """Do something.

        Args:
            action: A word.
        """
        if action == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "hang":
            while True:  # holds the interpreter
                pass
        if action == "raise":
            raise KeyError(action)
        if action == "exit":
            raise SystemExit(3)
        if action == "leak":
            self.leak = bytearray(os.urandom(1024) * 100 * 1024)
        self.count += 1
        return Step(f"{self.count} {action}", reward=0.5, terminated=action == "end")

    def available_actions(self) -> list[str]:
        return ["end"]

    @tool
    def add(self, n: int) -> str:
        """Add.

        Args:
            n: How much.
        """
        if n < 0:
            raise ToolFault("only up")
        self.count += n
        return str(self.count)

    @tool
    async def slowly(self) -> str:
        """Wait a little."""
        await asyncio.sleep(0)
        return "waited"

    def twice(self, n: int) -> int:
        return 2 * n

    async def later(self, n: int) -> int:
        await asyncio.sleep(0)
        return 3 * n

    def spawn(self) -> int:
        self.children.append(subprocess.Popen(["sleep", "60"]))
        return int(self.children[-1].pid)

    def snapshot(self) -> int:
        return self.count

    def restore(self, saved: int) -> None:
        self.count = saved


class Unwell(Odd):
    def reset(self, task: Task) -> str:  # type: ignore[override]
        raise OSError("no display")


class Stillborn(Odd):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class Dying(Odd):
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Sleepy(Odd):
    def __init__(self) -> None:
        time.sleep(60)
