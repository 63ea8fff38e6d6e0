"""Paths in a recipe.

What a recipe reads (tasks, demonstrations, pairs, code as file.py:name, databases, model folders, datasets) is
looked for beside the recipe, then in the working directory, and made absolute, so that a run can be resumed
from any folder. What a run writes (`run.folder`, a new recording) is in the working directory.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

COMMAND = "command:"
"""Prefix of an agent.loop that is a command."""
_FILE = re.compile(
    r"(?P<path>.+\.(?:jsonl|json|toml|parquet|py|txt|md|gguf|db|sqlite3?|duckdb|sql))(?P<rest>:[\w.]+)?"
)
_DATASET = re.compile(r"dataset:(?P<path>[^:@]+)(?P<rest>[:@].*)?")
_FOLDERS = (
    ("model", "name"),
    ("stage", "teacher"),
    ("rewards", "folder"),
    ("task_sets", "rewards", "folder"),
)
"""Keys whose texts name folders, which have no ending to be known by."""
_TEXTS = ("system", "run.folder", "wandb")
"""Keys whose texts are not read from: they are no path, or one that is written to."""


def with_absolute_paths(value: Any, root: Path | None = None, place: tuple[str, ...] = ()) -> Any:
    """Copy of the tables in which a text that names a path under `root` (the working directory) is absolute."""
    if isinstance(value, dict):
        return {name: with_absolute_paths(inner, root, (*place, name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_absolute_paths(inner, root, place) for inner in value]
    if not isinstance(value, str) or any(name in _TEXTS for name in (*place, ".".join(place))):
        return value
    if place == ("agent", "loop") and value.startswith(COMMAND):
        return _absolute_command(value, root or Path())
    match = _DATASET.fullmatch(value) or _FILE.fullmatch(value)
    if match is None and place not in _FOLDERS:
        return value
    path = match["path"] if match else value
    found = (root or Path()) / path
    if path.startswith("~") or not (found.exists() if match is None else _is_there(found, match)):
        return value
    start, rest = value[: match.start("path")] if match else "", match["rest"] or "" if match else ""
    return f"{start}{found.resolve()}{rest}"


def _absolute_command(value: str, root: Path) -> str:
    """The command with the files that it names in full: words that are files under `root`."""
    try:
        words = shlex.split(value.removeprefix(COMMAND))
    except ValueError:
        return value  # said when it is run
    found = [str((root / word).resolve()) if (root / word).is_file() else word for word in words]
    return value if found == words else f"{COMMAND} {shlex.join(found)}"


def _is_there(found: Path, match: re.Match[str]) -> bool:
    return found.is_dir() if match.re is _DATASET else found.exists()


def beside(raw: dict[str, Any], recipe: str | Path) -> dict[str, Any]:
    """The tables of a recipe's file, with what lies beside it named in full."""
    folder = Path(recipe).resolve().parent
    if folder == Path.cwd():
        return raw
    found: dict[str, Any] = with_absolute_paths(raw, folder)
    return found
