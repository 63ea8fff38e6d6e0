"""Mixed tool latencies: how close a rollout comes to its critical path, next to a lock-step loop.

    python benchmarks/latency.py [--episodes 64] [--turns 4] [--mean 1.0] [--sigma 1.0]
                                 [--generation 0.2] [--scale 1.0] [--draws 3]

Each of 64 episodes has 4 turns; in each turn the engine takes a fixed time, then one tool call takes a time
drawn from a lognormal distribution with a mean of 1 second. A last, short generation answers. The draws are
the same for both loops:

    bound      the longest episode, if nothing ever waited for anything else: no loop can be faster
    Ludus      `Rollout`: one coroutine per episode, as in training
    lock-step  every turn waits for the slowest call of the whole batch, as in loops that generate in batches

Both loops are really run; nothing is simulated but the tool and the engine, which sleep. `--scale 0.1` shortens
every time to a tenth. `--sigma` is the spread of the logarithm: 1.0 is a tail as of web requests.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, Sampling, Task, ToolCall
from ludus.engine import FakeEngine
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.tools import as_toolset, tool


@dataclass(frozen=True, slots=True)
class Workload:
    """How long everything takes: one tool latency for each episode (E) and turn (N), in seconds."""

    latency_EN: npt.NDArray[np.float64]
    generation: float

    @property
    def bound(self) -> float:
        """The critical path: the longest episode on its own. Its last turn is the answer, without a call."""
        generating = (self.latency_EN.shape[1] + 1) * self.generation
        return float(self.latency_EN.sum(axis=1).max() + generating)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Wall times in seconds."""

    bound: float
    ludus: float
    lock_step: float


def draw(episodes: int, turns: int, mean: float, sigma: float, generation: float, seed: int) -> Workload:
    """Lognormal latencies with the given mean, the same for the same seed."""
    location = np.log(mean) - sigma**2 / 2
    latency_EN = np.random.default_rng(seed).lognormal(location, sigma, (episodes, turns))
    return Workload(latency_EN, generation)


def rollout_of(workload: Workload) -> Rollout:
    """A rollout whose model calls the tool in every turn, and then answers."""
    tokenizer = ByteTokenizer()
    renderer = Renderer(tokenizer, load_format("hermes"))
    turns = workload.latency_EN.shape[1]
    taken: dict[str, int] = {}

    @tool(timeout=None)
    async def work(episode: int, turn: int) -> str:
        """Take as long as was drawn.

        Args:
            episode: Which episode.
            turn: Which turn.
        """
        await asyncio.sleep(workload.latency_EN[episode, turn])
        return "done"

    def script(tokens: list[int], sampling: Sampling, session: str | None) -> str:
        assert session is not None
        turn = taken[session] = taken.get(session, -1) + 1
        if turn == turns:
            return "finished"
        call = ToolCall("work", {"episode": int(session.split("/")[1]), "turn": turn})
        return renderer.format.render_action("", [call])

    @reward
    async def finished(answer: str) -> float:
        return float(answer == "finished")

    return Rollout(
        engine=FakeEngine(script, tokenizer, seconds=workload.generation),
        renderer=renderer,
        scorer=Scorer([finished]),
        tools=as_toolset([work]),
        budgets=Budgets(max_turns=turns + 1),
    )


async def run_ludus(workload: Workload) -> float:
    """The wall time of the rollout; every episode must have been finished and scored."""
    playing = rollout_of(workload)
    tasks = [Task.of("Work.", id=str(number)) for number in range(len(workload.latency_EN))]
    started = time.perf_counter()
    groups = [group async for group in playing.groups(tasks, seed=0)]
    seconds = time.perf_counter() - started
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    if rewards != [1.0] * len(tasks):
        raise RuntimeError(f"not every episode was finished: {rewards}")
    return seconds


async def run_lock_step(workload: Workload) -> float:
    """The wall time of a loop in which a turn ends when its slowest call does; it does nothing else."""
    started = time.perf_counter()
    for latency_E in workload.latency_EN.T:
        await asyncio.sleep(workload.generation)
        await asyncio.gather(*(asyncio.sleep(seconds) for seconds in latency_E))
    await asyncio.sleep(workload.generation)
    return time.perf_counter() - started


async def measure(workload: Workload) -> Outcome:
    """One loop after the other, on the same draws."""
    return Outcome(workload.bound, await run_ludus(workload), await run_lock_step(workload))


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes for people, one line for each set of draws."""
    lines = ["draws    bound    Ludus   over bound   lock-step   over bound   speed-up"]
    lines += [
        f"{number:>5}{o.bound:>8.2f}s{o.ludus:>8.2f}s{o.ludus / o.bound - 1:>12.1%}"
        f"{o.lock_step:>11.2f}s{o.lock_step / o.bound - 1:>12.1%}{o.lock_step / o.ludus:>10.2f}x"
        for number, o in enumerate(outcomes)
    ]
    worst = max(o.ludus / o.bound - 1 for o in outcomes)
    speed_up = statistics.median(o.lock_step / o.ludus for o in outcomes)
    end = f"Ludus: at most {worst:.1%} over the bound (target: 10%); median speed-up {speed_up:.2f}x"
    return "\n".join([*lines, end])


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts with mixed tool latencies.")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4, help="tool calls in each episode")
    parser.add_argument(
        "--mean", type=float, default=1.0, help="mean latency of a tool call, in seconds"
    )
    parser.add_argument(
        "--sigma", type=float, default=1.0, help="spread of the logarithm of the latency"
    )
    parser.add_argument("--generation", type=float, default=0.2, help="seconds per generation")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every time")
    parser.add_argument("--draws", type=int, default=3, help="how many sets of latencies to draw")
    given = parser.parse_args()
    mean, generation = given.mean * given.scale, given.generation * given.scale
    print(
        f"{given.episodes} episodes of {given.turns} tool calls, lognormal with mean {mean:g} s and "
        f"sigma {given.sigma:g}, {generation:g} s per generation"
    )
    workloads = [
        draw(given.episodes, given.turns, mean, given.sigma, generation, seed)
        for seed in range(given.draws)
    ]
    print(table([asyncio.run(measure(workload)) for workload in workloads]))


if __name__ == "__main__":
    main()
