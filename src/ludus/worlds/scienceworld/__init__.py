"""ScienceWorld: science experiments of elementary school in a text world (extra: scienceworld; needs Java).

Wang et al., "ScienceWorld: Is your Agent Smarter than a 5th Grader?" (2022). The tool is AgentFly's, the
sub-tasks are AgentGym's, and the reward is the score so far: AgentFly counts the highest, AgentGym the last.
"""

from __future__ import annotations

from ludus.core.failures import ConfigError, ToolFault
from ludus.core.messages import ToolResult
from ludus.core.task import Task
from ludus.envs.env import Env
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.tools import tool
from ludus.worlds.scienceworld.simulator import CALL_SECONDS, Simulator, SimulatorFault
from ludus.worlds.scienceworld.tasks import (
    FIRST_ACTION,
    VARIATIONS,
    agentgym_held_out_tasks,
    agentgym_training_tasks,
    expert,
    held_out_tasks,
    training_tasks,
)

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
