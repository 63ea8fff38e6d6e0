"""Recipes as files: those that come with Ludus, and reading one with overrides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ludus
from ludus.core.config import apply_overrides, read_toml
from ludus.core.failures import ConfigError, not_there
from ludus.observe import RunFolder
from ludus.training.config.paths import beside
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
