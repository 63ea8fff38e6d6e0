"""An environment for a server of the soak test: in some of its steps it hangs."""

from __future__ import annotations

import asyncio
import random

from ludus.core.task import Task
from ludus.envs import Env, Step

_draw = random.Random()


class Slow(Env):
    async def reset(self, task: Task) -> str:
        self.count = 0
        return "go"

    async def step(self, action: str) -> Step:
        if _draw.random() < 0.003:
            await asyncio.sleep(60)
        self.count += 1
        await asyncio.sleep(0.005)
        return Step(str(self.count), terminated=self.count == 3)
