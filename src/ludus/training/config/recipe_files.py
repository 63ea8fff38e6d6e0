"""Recipes as files: those that come with Ludus, reading one with overrides, and the paths in one.

What a recipe reads (tasks, demonstrations, code as file.py:name, databases, models) is looked for beside it,
then in the working directory, and made absolute. What a run writes (`run.folder`) is in the working directory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ludus
from ludus.core.config import apply_overrides, read_toml
from ludus.core.failures import ConfigError, not_there
from ludus.observe import RunFolder
from ludus.training.config.recipe import Recipe


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with Ludus, by name."""
    package = Path(ludus.__file__).parent
    places = (package / "recipes", package.parent.parent / "recipes")  # of a wheel, and of a checkout
    found = next((place for place in places if place.is_dir()), places[0])
    return {path.stem: path for path in sorted(found.glob("*.toml"))}


def find_recipe(path: str | Path) -> Path:
    """A recipe's file: the path itself, or the recipe of that name that comes with Ludus."""
    named = packaged_recipes()
    if Path(path).is_dir() and str(path) not in named:
        raise ConfigError(_of_folder(Path(path)))
    if Path(path).is_file() or Path(path).suffix:
        return Path(path)
    if str(path) not in named:
        known, missing = ", ".join(named), not_there(path, beside_recipe=False)
        raise ConfigError(f"{missing}, and no recipe of that name comes with Ludus: {known}")
    return named[str(path)]


def _of_folder(folder: Path) -> str:
    """Error text for a folder given in place of a recipe."""
    text = f"{folder} is a folder, and a recipe is a TOML file"
    if RunFolder(folder).is_run:
        return f"{text}: it is a run's, and `ludus train --resume {folder}` resumes it"
    if (folder / "config.json").is_file():
        return f"{text}: it holds a model, which a recipe trains by model.name={folder}"
    found = sorted(str(one) for one in folder.glob("*.toml"))
    return f"{text}: did you mean {' or '.join(found[:3])}?" if found else f"{text}; it holds none"


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a TOML file, or by its name, with `a.b=value` overrides."""
    given = list(overrides)
    path = find_recipe(path)
    raw = apply_overrides(beside(read_toml(path), path), given)
    refuse_empty(raw)
    is_named = any(override.startswith("model.name=") for override in given)
    is_made = any(override.startswith(("model.scratch=", "model.scratch.")) for override in given)
    if is_named != is_made:  # the one that is asked for replaces the recipe's
        raw["model"].pop("scratch" if is_named else "name", None)
    return Recipe.parse(raw, str(path))


def refuse_empty(raw: Mapping[str, Any]) -> None:
    """A list of stages or task sets without any, as a user wrote it: whatever is meant, nothing is done."""
    for name, usual in (("stage", "[warm_start] and [rl]"), ("task_sets", "[tasks]")):
        if name in raw and isinstance(raw[name], list | tuple) and not raw[name]:
            raise ConfigError(
                f"{name} = [] has no table: add [[{name}]] tables, or leave it out for {usual}"
            )


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
