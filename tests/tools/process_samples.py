"""Tools that run in worker processes; importable, as such tools must be."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ludus.core import Boundary, Fault, InfraError, ToolFault, ToolResult
from ludus.tools import Tool, tool


@dataclass
class Pair:
    a: int
    b: int = 1


@tool(process=True, timeout=30)
def add(pair: Pair) -> ToolResult:
    """Add."""
    return ToolResult(f"{pair.a + pair.b} in {os.getpid()}", reward=0.5, terminated=True)


@tool(process=True, timeout=30)
async def add_later(a: int) -> int:
    """Add one, later."""
    return a + 1


@tool(process=True, timeout=0.3)
def hang() -> None:
    """Never end."""
    while True:
        time.sleep(1)


@tool(process=True, retries=1)
def die(log: str) -> None:
    """Kill the process it runs in."""
    with Path(log).open("a") as file:
        file.write("died\n")
    os.kill(os.getpid(), signal.SIGKILL)


@tool(process=True)
def die_once(log: str) -> str:
    """Kill the process it runs in, the first time."""
    if not Path(log).exists():
        Path(log).write_text("died")
        os.kill(os.getpid(), signal.SIGKILL)
    return "recovered"


@tool(process=True)
def misbehave(how: str) -> object:
    """Return or raise something unpleasant."""
    if how == "raise":
        raise LookupError("nothing there")
    if how == "fault":
        raise ToolFault("say please", Fault.LIMIT)
    if how == "exit":
        sys.exit("bye")
    if how == "infra":
        raise InfraError(Boundary.SANDBOX, "the sandbox is gone", retriable=False)
    if how == "huge":
        return "x" * 100_000_000
    if how == "bytes":
        return b"ok \xff\xfe"
    if how == "next":
        return next(iter(()))
    return lambda: "cannot be pickled"


class Shout(Tool):
    """Say it loud."""

    process = True

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def run(self, text: str) -> str:
        return text.upper() + self.mark


@tool(process=True, timeout=30)
def broken(text: str) -> int:
    """A mistake of its author's."""
    return undefined_name[text]  # type: ignore[name-defined]  # noqa: F821
