"""Many episodes with faults injected: every one is played, failures are typed, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from odd_env import Odd

from ludus.core import Boundary, ByteTokenizer, Task, ToolCall
from ludus.engine import FakeEngine
from ludus.envs import Env, EnvPool, Step, load_env
from ludus.rewards import Scorer, reward
from ludus.rollouts import Agent, Budgets, Episode, Renderer, Rollout, load_format
from ludus.tools import as_toolset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Frail(Env):
    """In one of 50 calls it hangs or its connection is lost; in one of 50 resets it cannot start."""

    draw = random.Random(5)

    async def reset(self, task: Task) -> str:
        if self.draw.random() < 0.02:
            raise OSError("cannot start")
        self.count = 0
        return "go"

    async def step(self, action: str) -> Step:
        fate = self.draw.random()
        if fate < 0.01:
            await asyncio.sleep(60)
        if fate < 0.02:
            raise ConnectionError("gone")
        self.count += 1
        return Step(str(self.count), terminated=self.count == 3)


@reward(name="success")
def done(env: Any) -> float:
    return float(env.count == 3)


@reward(name="success")
def counted(env: Any) -> float:
    return float(env.count == 3 + 3)


def rollout(pool: EnvPool, scored_by: Any, **settings: Any) -> Rollout:
    said = load_format("hermes").render_action("", [ToolCall("step", {"action": "on"})])
    return Rollout(
        engine=FakeEngine(lambda tokens, sampling, session: f"{said}<|im_end|>", ByteTokenizer()),
        renderer=Renderer(ByteTokenizer(), load_format("hermes")),
        scorer=Scorer([scored_by]),
        tools=as_toolset([]),
        pools={pool.name: pool},
        budgets=Budgets(max_turns=3),
        **settings,
    )


async def test_two_thousand_light_episodes_with_hangs_and_lost_connections() -> None:
    pool = EnvPool(Frail, name="frail", size=32, step_timeout=0.5, max_uses=50, spares=2)
    playing = rollout(pool, done, attempts=4, max_in_flight=32, retries=2)
    tasks = [Task.of("go", id=str(n)) for n in range(500)]
    groups = [group async for group in playing.groups(tasks, seed=1)]
    played = [t for group in groups for t in group.trajectories]
    assert len(played) == 2000
    failures = Counter(t.failure.boundary for t in played if t.failure is not None)
    assert set(failures) <= {Boundary.ENV, Boundary.TOOL} and failures.total() < 20
    assert all(t.rewards == {"success": 1.0} for t in played if t.failure is None)
    assert (pool.stats.in_use, pool.stats.waiting) == (0, 0)
    await pool.close()
    assert pool.stats.created == pool.stats.closed > 32


class Noting(Agent):
    """Notes in which processes environments live."""

    processes: ClassVar[list[int]] = []

    async def run(self, episode: Episode) -> None:
        self.processes.append(episode.context.envs["odd"].process_id)
        await super().run(episode)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_processes_that_are_killed_take_no_episode_along() -> None:
    files, threads = open_files(), threading.active_count()
    pool = EnvPool(Odd, name="odd", size=8, step_timeout=30, max_uses=20)
    playing = rollout(pool, counted, attempts=2, max_in_flight=8, retries=3, agent=Noting())
    tasks = [Task.of("go", id=str(n), envs={"odd": {"level": 3}}) for n in range(150)]
    draw, killed = random.Random(3), 0

    async def kill() -> None:
        nonlocal killed
        while True:
            await asyncio.sleep(0.3)
            recent = Noting.processes[-8:]
            with contextlib.suppress(ProcessLookupError):
                if recent:
                    os.kill(draw.choice(recent), signal.SIGKILL)
                    killed += 1

    killing = asyncio.create_task(kill())
    groups = [group async for group in playing.groups(tasks, seed=1)]
    killing.cancel()
    played = [t for group in groups for t in group.trajectories]
    failed = [t.failure for t in played if t.failure is not None]
    assert len(played) == 300 and killed >= 3
    assert {failure.boundary for failure in failed} <= {Boundary.ENV, Boundary.REWARD}
    assert len(failed) <= killed
    assert all(t.rewards["success"] == 1.0 for t in played if t.failure is None)
    await pool.close()
    assert pool.stats.created == pool.stats.closed
    await nothing_is_left(files, threads)


async def nothing_is_left(files: int, threads: int) -> None:
    # those that were being made when the pool was closed are closed as soon as they are there
    end = time.monotonic() + 30
    while open_files() > files + 2 or threading.active_count() > threads + 10:
        assert time.monotonic() < end, "files or threads are left behind"
        await asyncio.sleep(0.05)


class Server:
    """`ludus serve env`, two replicas, killed and started again at the same port."""

    def __init__(self) -> None:
        self.port, self.starts = 0, 0
        self.start()

    def start(self) -> None:
        folder = Path(__file__).parent
        command = [sys.executable, "-m", "ludus", "serve", "env", f"slow={folder / 'soak_env.py'}:Slow"]
        options = ["--replicas", "2", "--size", "16", "--step-timeout", "30", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *options, "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.port, self.starts = int(told["address"].rpartition(":")[2]), self.starts + 1

    def replicas(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in found.split()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def test_a_server_that_is_killed_and_one_whose_steps_hang_take_no_episode_along() -> None:
    files, threads = open_files(), threading.active_count()
    server = Server()
    address = f"http://127.0.0.1:{server.port}"
    pool = EnvPool(load_env(f"{address}/slow"), name="slow", size=32, step_timeout=1.5, max_wait=600)
    playing = rollout(pool, done, attempts=4, max_in_flight=32, retries=8)
    tasks = [Task.of("go", id=str(n)) for n in range(500)]
    draw, killed = random.Random(7), Counter[str]()

    async def kill() -> None:
        while True:
            await asyncio.sleep(2.0)
            if killed.total() % 2:  # one replica, which its server replaces
                with contextlib.suppress(ProcessLookupError, IndexError):
                    os.kill(draw.choice(server.replicas()), signal.SIGKILL)
                    killed["replica"] += 1
            else:  # all of it
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(0.3)
                await asyncio.to_thread(server.start)
                killed["server"] += 1

    killing = asyncio.create_task(kill())
    groups = [group async for group in playing.groups(tasks, seed=1)]
    killing.cancel()
    await asyncio.gather(killing, return_exceptions=True)
    played = [t for group in groups for t in group.trajectories]
    assert len(played) == 2000 and killed["server"] >= 1 and killed["replica"] >= 1
    failures = Counter(t.failure.boundary for t in played if t.failure is not None)
    print(f"\nkilled {dict(killed)}, lost {dict(failures)}, instances {pool.stats.created}")
    assert set(failures) <= {Boundary.ENV, Boundary.SERVER} and failures.total() < 20
    assert all(t.rewards == {"success": 1.0} for t in played if t.failure is None)
    assert (pool.stats.in_use, pool.stats.waiting) == (0, 0)
    await pool.close()
    assert pool.stats.created == pool.stats.closed
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        token = Path.home() / ".local" / "state" / "ludus" / "token"
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
        while (
            True
        ):  # sessions whose end was not told, because the server was down or the step hung, are few
            async with http.get(f"{address}/healthz", headers=headers) as answer:
                health = await answer.json()
            if health["sessions"] <= 2 and health["alive"] == 2:
                break
            await asyncio.sleep(0.2)
    replicas = server.replicas()
    await asyncio.to_thread(server.kill)
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in replicas):  # noqa: ASYNC240 - they end with their server
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    await nothing_is_left(files, threads)
