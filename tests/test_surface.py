"""The public surface changes on purpose only: exported names, recipe keys, command-line options.

After a deliberate change: python tests/test_surface.py > tests/surface.txt
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

FROZEN = Path(__file__).with_name("surface.txt")


def names() -> Iterator[str]:
    import ludus

    yield from (f"name {name}" for name in sorted(ludus.__all__))


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        tables = [
            t
            for t in (field.annotation, *get_args(field.annotation))
            if isinstance(t, type) and issubclass(t, BaseModel)
        ]
        if tables:
            yield from keys(tables[0], f"{prefix}{name}.")
        else:
            yield f"key {prefix}{name}"


def options(command: Any, path: str = "ludus") -> Iterator[str]:
    for parameter in command.params:
        yield f"option {path} {'/'.join(parameter.opts)}"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from options(inner, f"{path} {name}")


def surface() -> str:
    import typer

    from ludus.cli.main import app
    from ludus.training import Recipe

    return "\n".join([*names(), *keys(Recipe), *options(typer.main.get_command(app))]) + "\n"


def test_the_surface_is_frozen() -> None:
    assert surface() == FROZEN.read_text(), f"see the top of {Path(__file__).name}"


def test_every_public_name_can_be_imported() -> None:
    import ludus

    for name in ludus.__all__:
        assert getattr(ludus, name) is not None


def test_every_recipe_key_is_explained() -> None:
    from ludus.training import Recipe

    def unexplained(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
        for name, field in model.model_fields.items():
            inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
            tables = [t for t in inner if issubclass(t, BaseModel)]
            if tables:
                yield from unexplained(tables[0], f"{prefix}{name}.")
            elif not field.description:
                yield prefix + name

    assert list(unexplained(Recipe)) == []


HEAVY = ("torch", "transformers", "tokenizers", "pyarrow", "pandas", "matplotlib", "datasets")


def loaded_by(program: str, folder: Path, *arguments: str) -> tuple[str, list[str]]:
    """What a program writes, and which heavy packages a process of its own has imported at its end."""
    shown = f"print('\\nLOADED', *set({HEAVY!r}) & set(sys.modules))"
    code = f"import atexit, sys; atexit.register(lambda: {shown})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{program}", *arguments],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    said, _, loaded = done.stdout.rpartition("LOADED")
    return said + done.stderr, loaded.split()


@pytest.mark.parametrize("name", ["tool", "reward", "Env", "Agent", "Recipe", "Task"])
def test_importing_ludus_is_light(name: str, tmp_path: Path) -> None:
    """Writing a tool must not load torch."""
    assert loaded_by(f"import ludus; ludus.{name}; dir(ludus)", tmp_path) == ("\n", [])


BROKEN = "[model]\nname = 'x'\n[rl]\nstepps = 1\n"
MISSING = "rewards = ['exact_match']\n[model]\nname = 'x'\n[tasks]\ntrain = 'missing.jsonl'\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("--help", "Train language-model agents"),
        ("train nope.toml", "there is no file nope.toml"),
        ("check recipe nope.toml", "there is no file nope.toml"),
        ("eval nope.toml", "nope.toml is neither a recipe"),
        ("train broken.toml", "unknown key; did you mean 'steps'?"),
        ("check recipe broken.toml", "unknown key; did you mean 'steps'?"),
        ("train missing.toml", "missing.jsonl cannot be read"),
        ("check recipe missing.toml rl.kl=0.1", "missing.jsonl cannot be read"),
        ("check env safe", "give it one of its own by --tasks"),
    ],
)
def test_mistakes_are_told_before_torch_is_imported(command: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text(BROKEN)
    (tmp_path / "missing.toml").write_text(MISSING)
    program = "from ludus.cli.main import run; run()"
    said, loaded = loaded_by(program, tmp_path, *command.split())
    assert expected in said
    assert loaded == []


def test_the_algorithms_that_recipes_know_without_torch_are_those_that_need_no_options() -> None:
    from ludus.algos import ALGORITHMS, load_algorithm
    from ludus.training.setting_checks import PLAIN

    assert set(ALGORITHMS) - {"dr_grpo"} == PLAIN  # dr_grpo needs a length
    for name in PLAIN:
        load_algorithm(name)


if __name__ == "__main__":
    print(surface(), end="")
