"""ScienceWorld's 30 tasks and their variations, split as the package does; gold paths as the demonstrator.

No Java is needed to list tasks: a task's variations are split by their number alone.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from functools import lru_cache
from typing import Literal

from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.worlds.scienceworld.simulator import SEED, Simulator

Split = Literal["train", "dev", "test"]

VARIATIONS: dict[str, dict[str, int]] = {
    "change-state": {"boil": 30, "melt": 30, "freeze": 30, "change-the-state-of-matter-of": 30},
    "measure": {
        "use-thermometer": 540,
        "measure-melting-point-known-substance": 436,
        "measure-melting-point-unknown-substance": 300,
    },
    "power-component": {"power-component": 20, "power-component-renewable-vs-nonrenewable-energy": 20},
    "test-conductivity": {"test-conductivity": 900, "test-conductivity-of-unknown-substances": 600},
    "find": {
        "find-living-thing": 300,
        "find-non-living-thing": 300,
        "find-plant": 300,
        "find-animal": 300,
    },
    "grow": {"grow-plant": 126, "grow-fruit": 126},
    "chemistry-mix": {
        "chemistry-mix": 32,
        "chemistry-mix-paint-secondary-color": 36,
        "chemistry-mix-paint-tertiary-color": 36,
    },
    "lifespan": {
        "lifespan-longest-lived": 125,
        "lifespan-shortest-lived": 125,
        "lifespan-longest-lived-then-shortest-lived": 125,
    },
    "identify-life-stages": {"identify-life-stages-1": 14, "identify-life-stages-2": 10},
    "inclined-plane": {
        "inclined-plane-determine-angle": 168,
        "inclined-plane-friction-named-surfaces": 1386,
        "inclined-plane-friction-unnamed-surfaces": 162,
    },
    "mendelian-genetics": {
        "mendelian-genetics-known-plant": 120,
        "mendelian-genetics-unknown-plant": 480,
    },
}
"""The tasks of each sub-task, in the package's order, each with the number of its variations."""
LONG = ("grow", "inclined-plane", "mendelian-genetics")
"""The sub-tasks that AgentGym leaves out; the other eight are its subsets."""
HELD_OUT_PER_TASK = 10
"""Test variations of a task that evaluation takes, so that no task outweighs the others."""

FIRST_ACTION = "look around"
"""First action of an episode; it takes a moment of the world's time."""
PROMPT = (
    "You are in a text world with a house and a laboratory. Do the task below, one action at a time."
)


def training_tasks() -> list[Task]:
    """Every training variation of the 30 tasks."""
    return list(tasks("train"))


def held_out_tasks() -> list[Task]:
    """The first 10 test variations of each of the 30 tasks."""
    return list(tasks("test", per_task=HELD_OUT_PER_TASK))


def agentgym_training_tasks() -> list[Task]:
    """The training variations of AgentGym's eight sub-tasks."""
    return list(tasks("train", long=False))


def agentgym_held_out_tasks() -> list[Task]:
    """The held-out tasks of AgentGym's eight sub-tasks."""
    return list(tasks("test", per_task=HELD_OUT_PER_TASK, long=False))


def tasks(split: Split, *, per_task: int | None = None, long: bool = True) -> Iterator[Task]:
    """The tasks of a split, `per_task` variations of each at most; `long` adds what AgentGym leaves out."""
    for subtask, counts in VARIATIONS.items():
        if not long and subtask in LONG:
            continue
        for name, count in counts.items():
            for variation in split_of(count, split)[:per_task]:
                yield Task.of(
                    PROMPT,
                    id=f"scienceworld-{name}-{variation}",
                    envs={"scienceworld": {"name": name, "variation": variation}},
                    metadata={"subtask": subtask, "task": name},
                )


def split_of(count: int, split: Split) -> range:
    """The variations of a split, of `count`: the package takes half, a quarter and the rest, in this order."""
    quarter = count // 4
    return {
        "train": range(2 * quarter),
        "dev": range(2 * quarter, 3 * quarter),
        "test": range(3 * quarter, count),
    }[split]


def expert(task: Task) -> Generator[ToolCall, str, None]:
    """A demonstrator: the package's gold path, which reaches the full score; some take more than 100 turns."""
    chosen = task.envs["scienceworld"]
    for action in gold_path(
        str(chosen["name"]), int(chosen["variation"]), str(chosen.get("simplifications", ""))
    ):
        yield ToolCall("scienceworld_explorer", {"action": action})


_GOLD_ATTEMPTS = 5
_GOLD_SECONDS = 600.0
"""For a call that works out a gold path: seconds on a machine that is idle, minutes on one that is not."""
_gold_lock = threading.Lock()
_gold_simulator: Simulator | None = None


@lru_cache(maxsize=8192)
def gold_path(name: str, variation: int, simplifications: str = "") -> tuple[str, ...]:
    """Actions that reach the full score. A simulator of its own works them out, which takes a second or more.

    The package's path is one that worked where it was made. Where chance decides (what a plant inherits), it
    may not work in the episode, whose random numbers are others: so it is tried, and else another one is made.
    """
    global _gold_simulator
    with _gold_lock:
        if _gold_simulator is None or not _gold_simulator.is_alive:
            _gold_simulator = Simulator(start_seconds=_GOLD_SECONDS, call_seconds=_GOLD_SECONDS)
        simulator = _gold_simulator
        path: list[str] = []
        for attempt in range(_GOLD_ATTEMPTS):
            seed = SEED + attempt
            simulator.load(name, variation, simplifications=simplifications, gold=True, seed=seed)
            path = simulator.gold_path()
            simulator.load(name, variation, simplifications=simplifications)
            simulator.step(FIRST_ACTION)
            for number, action in enumerate(path, 1):
                outcome = simulator.step(action)
                if outcome.score >= 100:
                    return tuple(path[:number])
                if outcome.is_over:
                    break
        return tuple(path)
