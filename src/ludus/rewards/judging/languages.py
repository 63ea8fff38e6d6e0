"""How programs are built and run, by language. Any other is a pair of command templates."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.core.failures import ConfigError

FILE, PROGRAM = "{file}", "{program}"


@dataclass(frozen=True, slots=True)
class Language:
    """A source file's name, the command that builds it if one is needed, and the one that runs it."""

    name: str
    fences: tuple[str, ...]
    file: str
    run: tuple[str, ...]
    build: tuple[str, ...] | None = None

    def command(self, words: Sequence[str]) -> list[str]:
        """A template with its places filled."""
        return [word.replace(FILE, self.file).replace(PROGRAM, "./program") for word in words]


LANGUAGES: dict[str, Language] = {
    one.name: one
    for one in (
        Language("python", ("python", "py", "python3"), "program.py", ()),
        Language(
            "c",
            ("c",),
            "program.c",
            (PROGRAM,),
            ("gcc", "-O2", "-std=gnu17", "-w", "-o", PROGRAM, FILE, "-lm"),
        ),
        Language(
            "c++",
            ("c++", "cpp", "cc", "cxx"),
            "program.cpp",
            (PROGRAM,),
            ("g++", "-O2", "-std=gnu++17", "-w", "-o", PROGRAM, FILE, "-lm"),
        ),
        Language("bash", ("bash", "sh", "shell"), "program.sh", ("bash", FILE)),
    )
}
"""Python has no command: it runs in a warm interpreter."""


def language_of(spec: str | Mapping[str, Any], name: str) -> Language:
    """A language by its name, or by a table: file, run, build, fences."""
    if isinstance(spec, str):
        if spec in LANGUAGES:
            return LANGUAGES[spec]
        raise ConfigError(
            f"{name!r}: there is no language {spec!r}; there are {', '.join(LANGUAGES)}, or give a table: "
            '{file = "program.rb", run = "ruby {file}"}'
        )
    unknown = set(spec) - {"file", "run", "build", "fences"}
    if unknown or not {"file", "run"} <= set(spec):
        raise ConfigError(
            f"{name!r}: a language's table has file and run, and may have build and fences; "
            f"this one has {', '.join(map(str, spec)) or 'nothing'}"
        )
    file = str(spec["file"])
    if "/" in file or not file:
        raise ConfigError(
            f"{name!r}: file is the name of the source file, without folders, not {file!r}"
        )
    build = _words(spec["build"]) if spec.get("build") else None
    return Language("other", tuple(spec.get("fences", ())), file, _words(spec["run"]), build)


def _words(command: Any) -> tuple[str, ...]:
    return tuple(shlex.split(command)) if isinstance(command, str) else tuple(map(str, command))
