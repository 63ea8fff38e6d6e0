"""The prebuilt environments in numbers: what their demonstrators and a random policy reach, and what they cost.

    python benchmarks/worlds.py [NAME ...] [--tasks 200] [--episodes 200] [--json FILE]

For each environment that is installed (where it is tools alone, an instance is what an episode has of them):

    expert      success of its demonstrator on held-out tasks, by `Rollout` and the tools that the model has
    random      success of a policy that draws from `available_actions()`, or else calls any tool with arguments
                that its schema allows
    reset, step p50 in milliseconds, one instance alone, and 16 at once in threads of one process
    MB          memory that one more instance takes (mean of 16, after a reset)
    leak        growth of memory over the second half of so many episodes, in MB
    load        the machine's load average of one minute at the start: with others at work, times grow

Memory is the proportional set size (PSS) of this process and all that it started: what n processes share counts
1/n for each. Where the system does not tell it, resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, Task, Trajectory
from ludus.engine import FakeEngine
from ludus.envs import WORLDS, EnvPool, World, call_env
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Demonstrator, Rollout
from ludus.rollouts.agent import RandomAgent, random_call
from ludus.rollouts.checked_instance import CheckedInstance
from ludus.sandbox import close_shared_sandboxes

INSTANCES = 16
_UNLIMITED = 10_000_000


def rollout_of(world: World, agent: Any, size: int) -> Rollout:
    """Plays `agent` through the environment's tools, with the turns of the papers; experts have any number."""
    turns = _UNLIMITED if isinstance(agent, Demonstrator) else world.max_turns
    return Rollout(
        engine=FakeEngine([]),
        renderer=Renderer(ByteTokenizer(), load_format("hermes")),
        scorer=Scorer(world.rewards),
        tools=world.toolset(),
        pools={world.name: EnvPool(world.factory, name=world.name, size=size)} if world.env else {},
        agent=agent,
        budgets=Budgets(max_turns=turns, max_tokens=_UNLIMITED, max_observation_tokens=_UNLIMITED),
        max_in_flight=size,
    )


async def play(world: World, agent: Any, tasks: list[Task], size: int = 4) -> list[Trajectory]:
    playing = rollout_of(world, agent, size)
    try:
        return [group.trajectories[0] async for group in playing.groups(tasks, seed=1)]
    finally:
        for pool in playing.pools.values():
            await pool.close()


def success_of(played: list[Trajectory]) -> float:
    """The share of successes; an infrastructure failure is an error here."""
    for trajectory in played:
        if trajectory.failure is not None:
            raise SystemExit(f"{trajectory.task.id}: {trajectory.failure}")
    return sum(t.rewards.get("success", t.reward or 0.0) >= 1.0 for t in played) / len(played)


class Walk:
    """Random episodes of one instance, timed; episode after episode."""

    def __init__(self, world: World, tasks: list[Task], number: int) -> None:
        self.world, self.tasks, self.number = world, tasks, number
        self.instance: CheckedInstance | None = None
        self.resets: list[float] = []
        self.steps: list[float] = []
        self._draw = random.Random(number)

    async def episode(self, index: int) -> None:
        if self.instance is None:
            env = await call_env(self.world.factory) if self.world.env else None
            self.instance = CheckedInstance(self.world.name, env, None if env else self.world.toolset())
        task = self.tasks[(self.number + index) % len(self.tasks)]
        started = time.perf_counter()
        _, tools, context, specs = await self.instance.start(task)
        self.resets.append(time.perf_counter() - started)
        for _ in range(self.world.max_turns):
            call = await random_call(self.instance.env, specs, self._draw)
            started = time.perf_counter()
            result = await tools.call(call, context)
            self.steps.append(time.perf_counter() - started)
            if result.terminated:
                break

    async def close(self) -> None:
        if self.instance is not None:
            await self.instance.close()


def memory() -> float:
    """Megabytes of this process and its children; what they share counts once, where that is known."""
    gc.collect()
    me, total = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            found = process.memory_full_info()
            total += getattr(found, "pss", found.rss)
    return total / 1e6


async def measure(world: World, tasks_at_most: int, episodes: int) -> dict[str, float]:
    held_out = world.tasks("held_out")
    tasks = held_out[:: -(-len(held_out) // tasks_at_most)]  # of all sub-tasks, which may be in order
    found: dict[str, float] = {
        "load": os.getloadavg()[0],
        "expert": success_of(await play(world, Demonstrator(world.expert), tasks)),
        "random": success_of(
            await play(world, RandomAgent(None if world.env else world.toolset()), tasks)
        ),
    }
    alone = Walk(world, tasks, 0)
    for index in range(max(3, 40 // INSTANCES)):
        await alone.episode(index)
    before = memory()
    many = [Walk(world, tasks, number) for number in range(INSTANCES)]
    await asyncio.gather(*(walk.episode(0) for walk in many))
    found["MB"] = max(0.0, (memory() - before) / INSTANCES)
    await asyncio.gather(*(walk.episode(1) for walk in many))
    for name, walks in (("1", [alone]), (str(INSTANCES), many)):
        found[f"reset {name}"] = 1000 * statistics.median(s for walk in walks for s in walk.resets)
        found[f"step {name}"] = 1000 * statistics.median(s for walk in walks for s in walk.steps)
    for walk in many:
        await walk.close()
    for index in range(episodes // 2):
        await alone.episode(index)
    settled = memory()
    for index in range(episodes // 2):
        await alone.episode(index)
    found["leak"] = memory() - settled
    await alone.close()
    await close_shared_sandboxes()
    return found


COLUMNS = ("expert", "random", "reset 1", "step 1", "reset 16", "step 16", "MB", "leak", "load")


def shown(name: str, value: float) -> str:
    return f"{value:.1%}" if name in ("expert", "random") else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(WORLDS))
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks at most")
    parser.add_argument("--episodes", type=int, default=200, help="episodes of the leak test")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in WORLDS]
    if unknown:
        parser.error(f"no environment {unknown[0]!r}; there are: {', '.join(WORLDS)}")
    print(f"| environment | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    results: dict[str, dict[str, float]] = {}
    for name in options.names or WORLDS:
        if missing := WORLDS[name].missing():
            print(f"{name}: not installed: {'; '.join(missing)}", file=sys.stderr)
            continue
        results[name] = asyncio.run(measure(WORLDS[name], options.tasks, options.episodes))
        cells = " | ".join(shown(column, results[name][column]) for column in COLUMNS)
        print(f"| {name} | {cells} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
