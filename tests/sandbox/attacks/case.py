"""A hostile program, and how its result is judged."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ludus.sandbox import Execution

Check = Callable[[Execution], str | None]
"""What is wrong with a result; None when it is as it must be."""


@dataclass(frozen=True)
class Case:
    """One program; `@HOME@`, `@TMP@`, `@PREFIX@`, `@PORT@` become where canaries are, `@HOST@` our pid."""

    name: str
    row: int
    """Which line of the table of attacks it belongs to."""
    code: str
    expect: Check
    kind: Literal["python", "forked", "shell", "run"] = "python"
    """"python" runs in a slot and, once more, in a process of its own; "forked" in the latter alone."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    stdin: str = ""
    bare: Check | Literal["skip"] | None = None
    """What is expected without namespaces, where that is less; "skip" where nothing holds it there."""


def ended(*outcomes: str) -> Check:
    """It ended in one of these ways."""

    def check(said: Execution) -> str | None:
        return None if said.outcome in outcomes else f"{said.outcome} instead of {' or '.join(outcomes)}"

    return check


def says(text: str) -> Check:
    """What a model reads of it contains `text`."""
    return lambda said: None if text in said.text() else f"{text!r} is missing"


def lacks(text: str) -> Check:
    """`text` is nowhere in it."""
    return lambda said: f"{text!r} is there" if text in said.text() else None


def every(*checks: Check) -> Check:
    """All of them hold."""

    def check(said: Execution) -> str | None:
        problems = [problem for one in checks if (problem := one(said)) is not None]
        return "; ".join(problems) or None

    return check


def counted(most: int) -> Check:
    """It printed `count N`, and N is no more than `most`."""

    def check(said: Execution) -> str | None:
        numbers = [
            int(line.split()[1]) for line in said.stdout.splitlines() if line.startswith("count ")
        ]
        if not numbers:
            return "no count was printed"
        return f"{max(numbers)} are more than {most}" if max(numbers) > most else None

    return check


def truncated(said: Execution) -> str | None:
    """What was too much of it is left out, and it says so."""
    if not said.truncated:
        return "not marked as truncated"
    size = len(said.stdout) + len(said.stderr)
    return None if size < 300_000 else f"{size} characters were kept"


def exit_code(number: int) -> Check:
    """It ended with this status."""
    return lambda said: None if said.exit_code == number else f"status {said.exit_code}, not {number}"


def signalled(*names: str) -> Check:
    """It was ended by one of these signals."""
    return lambda said: None if said.signal in names else f"signal {said.signal}, not {names}"


STOPPED = ended("timeout", "cpu", "memory", "processes", "output", "killed")
TIMEOUT = ended("timeout")
REFUSED = every(ended("ok"), says("refused"), lacks("BREACH"))
"""It tried several doors, told of each, and none was open."""
FINE = ended("ok")

SHORT: Mapping[str, Any] = {"wall_seconds": 1.0}
ROOMY: Mapping[str, Any] = {"wall_seconds": 30.0, "cpu_seconds": 30.0}

TRIES = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, function):
    try:
        result = function()
    except BaseException as error:
        print("refused", name, type(error).__name__, getattr(error, "errno", None))
    else:
        print("BREACH", name, repr(result)[:300])
def call(number, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
"""
"""Begins the programs that try doors."""

INTERNALS = """
import sys
frame = sys._getframe()
while frame.f_code.co_name != "_serve":
    frame = frame.f_back
inside, link = frame.f_globals, frame.f_locals["link"]
frames = inside["frames"]
"""
"""Finds the sandbox's own loop in the interpreter that runs the program."""


def numbered(calls: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """System call numbers on this machine, from those on x86_64 and aarch64; -1 is left out."""
    column = 0 if platform.machine() == "x86_64" else 1
    return {name: numbers[column] for name, numbers in calls.items() if numbers[column] >= 0}
