"""ALFWorld: household tasks in text (its game files are the user's: docs/envs/alfworld.md).

Shridhar et al., "ALFWorld: Aligning Text and Embodied Environments for Interactive Learning" (2021). The three
tools are AgentFly's.
"""

from __future__ import annotations

from ludus.core.messages import ToolResult
from ludus.core.task import Task
from ludus.envs.env import Env
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.tools import tool
from ludus.worlds.alfworld.game import Game
from ludus.worlds.alfworld.tasks import expert, held_out_tasks, load_game, training_tasks

__all__ = ["AlfWorld", "expert", "held_out_tasks", "success", "training_tasks"]


class AlfWorld(Env):
    """One game. A task gives `envs = {"alfworld": {"game": "train/pick_.../trial_..."}}`."""

    deterministic = True

    def __init__(self) -> None:
        self._played: Game | None = None

    def reset(self, task: Task, game: str) -> str:
        self._played = Game(load_game(game))
        return self._played.intro()

    @property
    def game(self) -> Game:
        """The game under way."""
        assert self._played is not None, "reset comes first"
        return self._played

    @property
    def won(self) -> bool:
        """Whether the goal's conditions hold."""
        return self._played is not None and self._played.won

    @tool
    def alfworld_step(self, action: str) -> ToolResult:
        """Do a command in the house.

        Args:
            action: For example "go to desk 1", "open drawer 2", "take mug 1 from desk 1", "move mug 1 to
                shelf 2", "clean mug 1 with sinkbasin 1", "heat egg 1 with microwave 1", "cool egg 1 with fridge
                1", "use desklamp 1", "examine mug 1", "inventory" or "look".
        """
        if self.game.won:
            return ToolResult("The episode is over: the task is done.", terminated=True)
        text = self.game.step(action)
        return ToolResult(text, reward=float(self.game.won), terminated=self.game.won)

    @tool
    def alfworld_get_admissible_commands(self) -> str:
        """List the commands that do something now."""
        return "\n".join(self.game.admissible_commands())

    @tool
    def alfworld_get_task_objective(self) -> str:
        """Say what the task is."""
        return self.game.file.objective

    def available_actions(self) -> list[str]:
        return self.game.admissible_commands()

    def render(self) -> str:
        return self.game.look()


@reward(name="success", weight=0.0)
async def success(env: AlfWorld) -> float:
    """1 when the goal's conditions hold. Only logged: the environment pays the same."""
    return float(env.won)


WORLD = World(
    "alfworld",
    "Do a household task in text: find, clean, heat, cool, place or look at things.",
    env=AlfWorld,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    data="LUDUS_ALFWORLD_DATA|ALFWORLD_DATA",
)
