"""ALFWorld's tasks: the game files below the folder that ALFWORLD_DATA names, and their walkthroughs."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from functools import lru_cache
from pathlib import Path

from ludus.core.failures import ConfigError
from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.worlds.alfworld.game import Game, GameFile, UnknownRules, read_game

VARIABLES = ("LUDUS_ALFWORLD_DATA", "ALFWORLD_DATA")
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
    given = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    for folder in (Path(given), Path(given) / "json_2.1.1"):
        if given and any((folder / split).is_dir() for split in ("train", "valid_seen", "valid_unseen")):
            return folder
    raise ConfigError(
        f"no games of ALFWorld in {given or 'any folder'}: set {' or '.join(VARIABLES)} to the folder that "
        "holds json_2.1.1 (docs/envs/alfworld.md)"
    )


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
