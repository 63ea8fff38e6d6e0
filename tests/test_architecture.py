"""The tree's promises: imports point to lower levels only, and the public surface changes on purpose only."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from parsed_source import parsed

SOURCE = Path(__file__).parent.parent / "src" / "ludus"
LEVELS = {
    "core": 0,
    "remote": 1,
    "chat": 2, "sandbox": 2, "algos": 2, "observe": 2, "kernels": 2, "llm": 2,
    "tools": 3, "rewards": 3, "model": 3,
    "envs": 4, "engine": 4,
    "rollouts": 5, "worlds": 5,
    "training": 6, "synth": 6, "serve": 6,
    "dist": 7, "viewer": 7,
    "cli": 8,
}  # fmt: skip
TORCH_ROOMS = {"algos", "kernels", "model", "engine", "training", "dist"}
CORE_MAY_IMPORT = {"numpy", "pydantic"}


REFERENCE = re.compile(r"ludus(?:\.[a-z_]+)+(?::[\w.]+)?")
"""A module or a name in it, as text: loaded later, so an import by another way."""


def _named(tree: ast.Module) -> Iterator[str]:
    """Modules that are named in strings, docstrings aside."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from REFERENCE.findall(node.value)


def _imports(tree: ast.Module, *, top_level_only: bool = False) -> Iterator[str]:
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the level they cross"
            yield node.module or ""


@cache
def _modules() -> list[tuple[str, str, ast.Module]]:
    files = [f for f in SOURCE.rglob("*.py") if f.parent != SOURCE]
    return [(f.relative_to(SOURCE).parts[0], str(f), parsed(f)) for f in files]


def test_every_room_is_known() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= LEVELS.keys()


PYPROJECT = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())
GROUPS = PYPROJECT["project"]["entry-points"].keys()
"""Entry point groups, whose names are no modules."""


def test_imports_point_to_lower_levels_only() -> None:
    wrong = [
        f"{file} imports {name}"
        for room, file, tree in _modules()
        for name in (*_imports(tree), *_named(tree))
        if name.startswith("ludus.")
        and name not in GROUPS
        and (other := re.split(r"[.:]", name)[1]) != room
        and LEVELS.get(other, 0) >= LEVELS[room]
    ]
    assert not wrong


def _graph() -> dict[str, set[str]]:
    """What each module imports when it is imported."""
    names = {}
    for _, file, tree in _modules():
        parts = Path(file).relative_to(SOURCE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree
    return {
        name: {
            inner if inner in names else node.module
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ludus.")
            for inner in (f"{node.module}.{alias.name}" for alias in node.names)
        }
        for name, tree in names.items()
    }


def test_no_module_imports_itself_by_a_detour() -> None:
    list(TopologicalSorter(_graph()).static_order())  # raises CycleError with the cycle


def test_one_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for _, file, tree in _modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(Path(file).relative_to(SOURCE).as_posix())
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_torch_is_imported_where_it_belongs() -> None:
    wrong = [
        f"{file} imports {name} at module level"
        for room, file, tree in _modules()
        if room not in TORCH_ROOMS
        for name in _imports(tree, top_level_only=True)
        if name.split(".")[0] in {"torch", "transformers"}
    ]
    assert not wrong


def test_core_needs_little() -> None:
    import sys

    allowed = CORE_MAY_IMPORT | set(sys.stdlib_module_names) | {"ludus"}
    wrong = [
        f"{file} imports {name}"
        for room, file, tree in _modules()
        if room == "core"
        for name in _imports(tree)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("word", ["utils", "helpers", "common", "misc"])
def test_no_drawer_for_odds_and_ends(word: str) -> None:
    assert not [f for f in SOURCE.rglob("*") if re.fullmatch(rf"{word}(\.py)?", f.name)]
