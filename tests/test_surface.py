"""The public surface changes on purpose only: exported names, recipe keys, command-line options.

After a deliberate change: python tests/test_surface.py > tests/surface.txt
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

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


def test_importing_ludus_is_light() -> None:
    """Writing a tool must not load torch."""
    import subprocess
    import sys

    program = "import ludus, sys; ludus.tool; assert 'torch' not in sys.modules, 'torch was loaded'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    print(surface(), end="")
