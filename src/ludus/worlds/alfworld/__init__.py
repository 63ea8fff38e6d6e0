"""ALFWorld: household tasks in text (its game files are the user's: docs/envs/alfworld.md).

Shridhar et al., "ALFWorld: Aligning Text and Embodied Environments for Interactive Learning" (2021). The three
tools are AgentFly's.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from functools import lru_cache
from pathlib import Path

from ludus.core.failures import ConfigError
from ludus.core.messages import ToolCall, ToolResult
from ludus.core.task import Task
from ludus.envs.env import Env
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.tools import tool
from ludus.worlds import data_path
from ludus.worlds.alfworld.game import Game, GameFile, UnknownRules, read_game

VARIABLES = "LUDUS_ALFWORLD_DATA|ALFWORLD_DATA"
SUBTASKS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
PROMPT = "You are in a house. Do the task below, one command at a time."
GAME = "game.tw-pddl"
_TAIL = 16384
"""Bytes at the end of a game file in which it says whether it can be solved."""


def training_tasks() -> list[Task]:
    """The games of the split `train`."""
    return _tasks("train")


def held_out_tasks() -> list[Task]:
    """The games of `valid_seen` (rooms of the training split, other tasks) and `valid_unseen` (other rooms)."""
    return _tasks("valid_seen") + _tasks("valid_unseen")


def data_folder() -> Path:
    """The folder with the splits."""
    what = "the folder that holds json_2.1.1 (docs/envs/alfworld.md)"
    given = data_path(VARIABLES, what)
    for folder in (given, given / "json_2.1.1"):
        if any((folder / split).is_dir() for split in ("train", "valid_seen", "valid_unseen")):
            return folder
    names = VARIABLES.replace("|", " or ")
    raise ConfigError(f"no games of ALFWorld in {given}: set {names} to {what}")


def load_game(game: str) -> GameFile:
    """A game by its folder, relative to the data's."""
    return _load(data_folder() / game / GAME)


@lru_cache(maxsize=256)
def _load(path: Path) -> GameFile:
    again = "get it again with alfworld-download of ALFWorld 0.4"
    try:
        file = read_game(json.loads(path.read_text()))
        Game(file)  # its facts are those of a game
    except UnknownRules as error:
        raise ConfigError(
            f"the game {path} is damaged or of another version: {error}; {again}"
        ) from error
    except OSError as error:
        raise ConfigError(f"the game {path} cannot be read: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the game {path} is damaged ({type(error).__name__}: {error}); {again}"
        ) from error
    return file


def _tasks(split: str) -> list[Task]:
    """The games of a split that the package plays: solvable, and without slicing or movable receptacles."""
    found = []
    for path in sorted((data_folder() / split).glob(f"*/*/{GAME}")):
        trial, kind = path.parent, path.parent.parent.name
        subtask = kind.partition("-")[0]
        if subtask not in SUBTASKS or "movable" in kind or "Sliced" in kind or not _is_solvable(path):
            continue
        found.append(
            Task.of(
                PROMPT,
                id=f"alfworld-{split}-{kind}-{trial.name}",
                envs={"alfworld": {"game": f"{split}/{kind}/{trial.name}"}},
                metadata={"subtask": subtask, "split": split},
            )
        )
    return found


def _is_solvable(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return b'"solvable": true' in file.read()


def expert(task: Task) -> Generator[ToolCall, str, None]:
    """A demonstrator: the game's walkthrough, whose planner knows where everything is."""
    for command in load_game(str(task.envs["alfworld"]["game"])).walkthrough:
        yield ToolCall("alfworld_step", {"action": command})


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
    data=VARIABLES,
)
