"""`budgets.max_seconds` is the episode's own time: what it waits for in our queues does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout_parts import called, play, play_one, rollout

from ludus.core import Boundary, Task
from ludus.envs import Env, EnvPool
from ludus.tools import tool

LIMIT = 1.5
"""Seconds of an episode. It needs a small part of them, and waits for longer."""


def once(tool: str) -> Callable[..., str]:
    """A model that calls a tool, and then answers."""
    seen: set[Any] = set()

    def script(tokens: list[int], sampling: Any, session: str | None) -> str:
        if session in seen:
            return "done"
        seen.add(session)
        return called(tool)

    return script


class Desk(Env):
    """One works at it for a while."""

    async def reset(self, task: Task) -> str:
        return "a desk"

    @tool
    async def work(self) -> str:
        """Work."""
        await asyncio.sleep(0.15)
        return "done"


async def test_waiting_for_an_environment_is_not_the_episodes_time() -> None:
    pool = EnvPool(Desk, name="desk", size=1)
    playing = rollout(
        once("work"),
        pools={"desk": pool},
        attempts=16,
        budgets={"max_seconds": LIMIT},
        retries=0,
    )
    [group] = await play(playing)
    assert [one.failure for one in group.trajectories] == [None] * 16
    assert all(one.turns == 2 for one in group.trajectories)
    waits = [
        span.seconds for one in group.trajectories for span in one.spans if span.kind == "environment"
    ]
    assert max(waits) > LIMIT, "the last one waited for longer than an episode may take"
    await pool.close()


async def test_the_longest_wait_of_a_pool_holds_above_the_episodes_time() -> None:
    pool = EnvPool(Desk, name="desk", size=1, max_wait=0.6)
    await pool.acquire("somebody else", Task.of("x"))
    playing = rollout(["done"], pools={"desk": pool}, budgets={"max_seconds": 0.1}, retries=0)
    trajectory = await play_one(playing)
    assert trajectory.failure is not None and trajectory.failure.boundary is Boundary.POOL
    assert "within 0.6 seconds" in trajectory.failure.message
    await pool.release("somebody else")
    await pool.close()


async def test_waiting_for_a_tool_is_not_the_episodes_time() -> None:
    @tool(max_concurrency=1)
    async def crowded() -> str:
        """One at a time."""
        await asyncio.sleep(0.15)
        return "done"

    playing = rollout(
        once("crowded"),
        tools=[crowded],
        attempts=16,
        budgets={"max_seconds": LIMIT},
        retries=0,
    )
    [group] = await play(playing)
    assert [one.failure for one in group.trajectories] == [None] * 16
    assert (
        max(span.seconds for t in group.trajectories for span in t.spans if span.kind == "queue") > LIMIT
    )


async def test_a_slow_tool_is_the_episodes_time() -> None:
    @tool(max_concurrency=1)
    async def slow() -> str:
        """Take long."""
        await asyncio.sleep(20)
        return "done"

    playing = rollout([called("slow"), "done"], tools=[slow], budgets={"max_seconds": 0.2}, retries=0)
    trajectory = await play_one(playing)
    assert trajectory.failure is not None and trajectory.failure.boundary is Boundary.DEADLINE
