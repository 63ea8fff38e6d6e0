"""What the documentation names exists: files, functions of the walks, commands and options, keys, modules.

Words of other people's files, commands and libraries are not looked at: a file is one of ours when its first
folder is a room or a folder of the repository, a key when its first word is a table of a recipe.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import ludus
from ludus.cli.main import app
from ludus.cli.settings import find_settings
from ludus.core.config_errors import OTHER_FRAMEWORKS_KEYS
from ludus.core.failures import ConfigError
from ludus.training.config.recipe import Recipe
from parsed_source import parsed
from test_architecture import LEVELS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ludus"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *DOCS]
SCRIPTS = [path for name in ("benchmarks", "examples", "dev") for path in (ROOT / name).rglob("*.py")]
FOLDERS = {"tests", "benchmarks", "examples", "recipes", "dev", "docs", "src"}
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
COMMAND = typer.main.get_command(app)


def _inline(text: str) -> Iterator[str]:
    """What stands in backticks outside of blocks."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def _file(path: str) -> Path:
    return (ROOT if path.partition("/")[0] in FOLDERS else SOURCE) / path


def _defined(path: Path) -> set[str]:
    """Names that a file or a package defines or assigns."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    found: set[str] = set()
    for file in files:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def test_the_table_of_rooms_is_the_source_tree() -> None:
    table = dict(re.findall(r"^\| \d \| `(\w+)` \| (.+) \|$", ARCHITECTURE, re.M))
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert table.keys() == rooms
    levels = re.findall(r"^\| (\d) \| `(\w+)` \|", ARCHITECTURE, re.M)
    assert {room: int(level) for level, room in levels} == LEVELS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    rooms = "|".join(LEVELS)
    ours = re.compile(rf"(?:src/ludus/)?(?:{rooms}|{'|'.join(FOLDERS)})/[a-z_/.-]*(?:\.[a-z]+|/)")
    missing = []
    for code in _inline(page.read_text()):
        for word in code.split():
            name = word.partition(":")[0].rstrip(",;")
            if ours.fullmatch(name) and not _file(name).exists():
                missing.append(name)
    assert not missing


def test_functions_of_the_walks_are_in_their_files() -> None:
    walks = ARCHITECTURE.partition("## Six walks")[2].partition("\n## ")[0]
    steps = re.findall(r"`([\w/]+(?:\.py|/))`\s+\(([^()]*(?:\([^()]*\)[^()]*)*)\)", walks)
    assert len(steps) > 25
    missing = [
        f"{path}: {name}"
        for path, told in steps
        for code in _inline(told)
        if re.fullmatch(r"[A-Za-z_][\w.]*", code) and not code.startswith("rl.")
        for name in code.split(".")
        if name not in _defined(_file(path))
    ]
    assert not missing


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each `ludus ...` that a page shows, in a block or in a line."""
    blocks = re.findall(r"^```(?:bash|text)?\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    for line in [*lines, *_inline(text)]:
        for part in re.split(r"&&|\||;", line):
            found = re.match(r"\s*(?:[A-Z_]+=\S+ +)*(?:make )?(ludus [a-z].*)", part)
            if found and not line.lstrip().startswith("make"):
                try:
                    yield shlex.split(found[1], comments=True)[1:]
                except ValueError:  # a quote that the split has cut
                    yield found[1].split()[1:]


def _unknown(words: list[str]) -> str | None:
    """What of a command line there is not: its command, or an option."""
    command = COMMAND
    while words and (inner := getattr(command, "commands", None)):
        if words[0] not in inner:
            return None if words[0].startswith("-") else f"no command {words[0]!r}"
        command, words = inner[words[0]], words[1:]
    options = {name for one in command.params for name in [*one.opts, *one.secondary_opts]}
    for word in words:
        name = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]+|-[a-zA-Z]", name) and name not in options | {"--help", "-h"}:
            return f"no option {name} of `ludus {command.name}`"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    wrong = [(" ".join(words), why) for words in _commands(page.read_text()) if (why := _unknown(words))]
    assert not wrong


NO_KEYS = {"engine.stats", "tasks.difficulty"}
"""An attribute of the engine, and a setting that only a curriculum has."""
TABLES = {name for name, field in Recipe.model_fields.items() if "Config" in str(field.annotation)}


@cache
def _is_key(key: str) -> bool:
    try:
        return bool(find_settings(key)[0])
    except ConfigError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_of_recipes_exist(page: Path) -> None:
    text = page.read_text()
    named = {
        found[1]
        for code in _inline(text)
        if (found := re.match(r"((?:[a-z_0-9]+\.)+[a-z_0-9]+)(?=$| ?=| ?\[)", code))
        and found[1].partition(".")[0] in TABLES
        and not found[1].endswith(".py")
    }
    for block in re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S):
        if (made := tomllib.loads(block)).keys() & TABLES:  # and no rubric of a judge
            named |= set(_keys(made))
    assert not sorted(key for key in named - NO_KEYS if not _is_key(key))


def _keys(recipe: dict[str, Any]) -> Iterator[str]:
    for name, value in recipe.items():
        yield name
        for one in value if isinstance(value, list) else [value]:
            if name in TABLES and isinstance(one, dict):
                yield from (f"{name}.{key}" for key in one)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_names_exist(page: Path) -> None:
    missing = []
    for code in _inline(page.read_text()):
        found = re.fullmatch(r"(ludus(?:\.\w+)+)(?:\(.*\)|:\w+)?", code)
        if found and found[1] not in ENTRY_POINTS and not _resolves(found[1]):
            missing.append(code)
    assert not missing


def _resolves(name: str) -> bool:
    here: object = ludus
    for count, part in enumerate(name.split(".")[1:], start=2):
        try:
            here = getattr(here, part)
        except AttributeError:
            try:
                here = importlib.import_module(".".join(name.split(".")[:count]))
            except ImportError:
                return False
    return True


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_import_what_there_is(script: Path) -> None:
    """Benchmarks and examples run seldom, and move with the source all the same."""
    missing = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(parsed(script))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ludus"
        for alias in node.names
        if not _resolves(f"{node.module}.{alias.name}")
    ]
    assert not missing


def test_the_words_of_other_frameworks_lead_to_the_keys_of_their_table() -> None:
    """docs/coming_from.md and `ludus settings WORD` say the same."""
    page = (ROOT / "docs" / "coming_from.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ((?:`\w+`(?:, )?)+) \|$", page, re.M)
    assert len(rows) > 20
    table = {word: key for key, words in rows for word in _inline(words)}
    assert table == OTHER_FRAMEWORKS_KEYS
