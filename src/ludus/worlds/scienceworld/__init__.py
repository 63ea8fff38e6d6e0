"""ScienceWorld: science experiments of elementary school in a text world (extra: scienceworld; needs Java).

Wang et al., "ScienceWorld: Is your Agent Smarter than a 5th Grader?" (2022). The tool is AgentFly's, the
sub-tasks are AgentGym's, and the reward is the score so far: AgentFly counts the highest, AgentGym the last.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from functools import lru_cache
from typing import Literal

from ludus.core.failures import ConfigError, ToolFault
from ludus.core.messages import ToolCall, ToolResult
from ludus.core.task import Task
from ludus.envs.env import Env
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.tools import tool
from ludus.worlds.scienceworld.simulator import CALL_SECONDS, SEED, Simulator, SimulatorFault

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


__all__ = [
    "ScienceWorld",
    "agentgym_held_out_tasks",
    "agentgym_training_tasks",
    "expert",
    "held_out_tasks",
    "success",
    "training_tasks",
]

EPISODES_PER_PROCESS = 200
"""The simulator keeps a little of every episode; after so many it is replaced."""
MAX_ACTION = 400
"""Characters of an action; the longest valid one has about 150."""


class ScienceWorld(Env):
    """One simulator. A task gives `envs = {"scienceworld": {"name": "boil", "variation": 3}}`."""

    step_rewards = "max"
    deterministic = True

    def __init__(self, call_seconds: float = CALL_SECONDS) -> None:
        """In a recipe, `[agent.pools.scienceworld] options`: `call_seconds` is how long the simulator may take
        to start, and for a call, beside the pool's `reset_timeout` and `step_timeout`."""
        self.score = 0
        """The package's score now, from 0 to 100; -100 after a focus on the wrong object."""
        self.best = 0
        """The highest score of the episode."""
        self._is_over = False
        self._episodes = 0
        self._call_seconds = call_seconds
        self._simulator = self._new_simulator()

    def reset(self, task: Task, name: str, variation: int, simplifications: str = "") -> str:
        known = {task: count for counts in VARIATIONS.values() for task, count in counts.items()}
        if not 0 <= variation < known.get(name, 0):
            raise ConfigError(
                f"task {task.id!r}: ScienceWorld has no variation {variation} of the task {name!r}; its tasks "
                f"and their numbers of variations are {known}"
            )
        if self._episodes >= EPISODES_PER_PROCESS:
            self._simulator.close()
            self._simulator, self._episodes = self._new_simulator(), 0
        self._episodes += 1
        self._is_over = False
        description = self._simulator.load(name, variation, simplifications=simplifications)
        first = self._simulator.step(FIRST_ACTION)
        self.score = self.best = first.score
        return f"{description}\n{first.text}"

    @tool
    def scienceworld_explorer(self, action: str) -> ToolResult:
        """Act in the world. OBJ is an object that you see or carry, with its place where several have its name.

        Args:
            action: One of: look around; look at OBJ; look in OBJ; inventory; task; open OBJ; close OBJ; go to
                LOC; pick up OBJ; put down OBJ; move OBJ to OBJ; pour OBJ into OBJ; dunk OBJ into OBJ; mix OBJ;
                activate OBJ; deactivate OBJ; use OBJ; use OBJ on OBJ; connect OBJ to OBJ; disconnect OBJ; read
                OBJ; eat OBJ; flush OBJ; focus on OBJ (the object of the task, and no other); wait; wait1; a
                number that answers an ambiguous request; Finish (when the task is done or cannot be done).
        """
        if self._is_over:
            return ToolResult("The episode is over.", terminated=True)
        text = action.strip().encode(errors="replace").decode()
        if len(text) > MAX_ACTION:
            raise ToolFault(f"an action has {MAX_ACTION} characters at most")
        if text.lower().rstrip("[]().") == "finish":
            self._is_over = True
            return ToolResult("The episode is finished.", reward=self._paid(), terminated=True)
        try:
            outcome = self._simulator.step(text)
        except SimulatorFault as error:
            raise ToolFault(f"the simulator could not do that: {error}"[:500]) from error
        self.score, self._is_over = outcome.score, outcome.is_over
        self.best = max(self.best, self.score)
        return ToolResult(outcome.text, reward=self._paid(), terminated=self._is_over)

    def available_actions(self) -> list[str]:
        """Every valid action: some hundreds, in the time of ten steps."""
        return [] if self._is_over else self._simulator.valid_actions()

    def render(self) -> str:
        return self._simulator.look()

    def is_healthy(self) -> bool:
        return self._simulator.is_alive

    def close(self) -> None:
        self._simulator.close()

    def _new_simulator(self) -> Simulator:
        return Simulator(start_seconds=self._call_seconds, call_seconds=self._call_seconds)

    def _paid(self) -> float:
        """The score so far as a reward; the papers count a negative score as 0."""
        return max(0, self.score) / 100


@reward(name="success", weight=0.0)
async def success(env: ScienceWorld) -> float:
    """1 when the score reached 100. Only logged: the environment pays the score."""
    return float(env.best >= 100)


WORLD = World(
    "scienceworld",
    "Do an experiment of elementary school in a text world: 30 tasks with 7,207 variations.",
    env=ScienceWorld,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    extra="scienceworld",
    packages=("scienceworld", "py4j"),
    programs=("java",),
)
