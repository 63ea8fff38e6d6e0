"""TextCraft: craft an item of Minecraft from crafting commands, some needed and some not (extra: textcraft).

Prasad et al., "ADaPT" (2023); the commands and texts are those of AgentGym (Xi et al., 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ludus.core.task import Task
from ludus.envs.env import Env, Step
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.worlds.textcraft.book import load_book
from ludus.worlds.textcraft.game import CraftingGame, parse_command
from ludus.worlds.textcraft.tasks import expert, held_out_tasks, training_tasks

__all__ = ["TextCraft", "expert", "held_out_tasks", "success", "training_tasks"]


class TextCraft(Env):
    """One game. A task gives it as `envs = {"textcraft": {"goal": ..., "commands": [...]}}`.

    Its methods take microseconds, so they are coroutines: a thread would cost more than it spares.
    """

    deterministic = True

    def __init__(self) -> None:
        self.game: CraftingGame | None = None

    @property
    def won(self) -> bool:
        """Whether the goal has been crafted."""
        return self.game is not None and self.game.won

    async def reset(self, task: Task, goal: str, commands: Sequence[str]) -> None:
        self.game = CraftingGame(load_book(), goal, map(parse_command, commands))

    async def step(self, action: str) -> Step:
        """Act in the game: get an item, craft one with a crafting command, or look at the inventory.

        Args:
            action: For example "get 2 oak log", "craft 4 oak planks using 1 oak log" or "inventory".
        """
        game = self._game()
        if game.won:
            return Step("The game is over: the goal has been crafted.", terminated=True)
        outcome = game.act(action)
        return Step(outcome.text, reward=float(outcome.won), terminated=outcome.won)

    async def available_actions(self) -> list[str]:
        return self._game().available()

    async def render(self) -> str:
        game = self._game()
        return f"Goal: craft {game.goal}. {game.shown()}"

    async def snapshot(self) -> Counter[str]:
        """The inventory: the rest is the task's."""
        return self._game().inventory.copy()

    async def restore(self, state: Counter[str]) -> None:
        self._game().inventory = state.copy()

    def _game(self) -> CraftingGame:
        assert self.game is not None, "reset comes first"
        return self.game


@reward(name="success", weight=0.0)
async def success(env: TextCraft) -> float:
    """1 when the goal has been crafted. Only logged: the environment pays the same."""
    return float(env.won)


WORLD = World(
    "textcraft",
    "Craft an item of Minecraft from crafting commands, at depth 1 to 4.",
    env=TextCraft,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    extra="textcraft",
    packages=("minecraft_data",),
)
