"""Source files on the walks of a tiny run: which files' functions are called, and which files call each other.

A walk is traced by running it on a CPU, with a profile function in every thread. A file counts when one of its
functions is called; an edge leads from the file of the nearest Ludus frame to the file that it calls. Two files
that call each other are a two-way edge: a callback, or a cut in the wrong place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ludus"
_PREFIX = f"{SOURCE}{os.sep}"


@dataclass
class Walk:
    """Files and edges that were met while the walk was recorded."""

    files: set[str] = field(default_factory=set)
    edges: set[tuple[str, str]] = field(default_factory=set)
    recording: bool = False
    until: str | None = None
    """Recording ends when a function of this name is called."""

    @property
    def two_way(self) -> list[tuple[str, str]]:
        return sorted((a, b) for a, b in self.edges if a < b and (b, a) in self.edges)

    @property
    def lines(self) -> int:
        return sum(len((SOURCE / name).read_text().splitlines()) for name in self.files)

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.recording or event != "call" or not frame.f_code.co_filename.startswith(_PREFIX):
            return
        if frame.f_code.co_name == self.until:
            self.recording = False
            return
        here = frame.f_code.co_filename[len(_PREFIX) :]
        self.files.add(here)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(_PREFIX):
            caller = caller.f_back
        if caller is not None and (there := caller.f_code.co_filename[len(_PREFIX) :]) != here:
            self.edges.add((there, here))


@contextlib.contextmanager
def traced(*, recording: bool = True, until: str | None = None) -> Iterator[Walk]:
    """Trace this thread and those that start meanwhile; `recording` may be switched on and off."""
    walk = Walk(recording=recording, until=until)
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def walks() -> dict[str, Walk]:
    """Every walk by its name."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        command = f"agent.loop={f'command: python {program}'!r}"
        return {
            "a whole step": _second_step(
                "tickets", folder, "warm_start.steps=100", "warm_start.batch=16"
            ),
            "a program's step": _second_step("ticket_agent", folder, "warm_start.steps=60", command),
            "a program's requests": _second_step(
                "ticket_agent", folder, "warm_start.steps=60", command, until="policy_update"
            ),
            "a sandboxed call": asyncio.run(_sandboxed_call()),
        }


PROGRAM = """
import json, os, sys, urllib.request
tool = {"name": "assign", "parameters": {"type": "object", "properties": {"to": {"type": "string"}}}}
tools = [{"type": "function", "function": tool}]
body = {"model": "policy", "messages": json.load(sys.stdin)["messages"], "tools": tools}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)).read()
"""


def _second_step(name: str, folder: str, *overrides: str, until: str | None = None) -> Walk:
    """From a task to new weights in the engine: the second step of RL, in which tools are called."""
    import ludus
    from ludus.training.config.recipe import load_recipe

    small = [
        "threads=1",
        f"run.folder={folder + os.sep + name + (until or '')!r}",
        "rl.steps=3",
        "rl.tasks=4",
        "rl.attempts=4",
    ]
    small += ["evaluation.tasks=1", "rl.optimizer.learning_rate=1e-4", *overrides]
    recipe = load_recipe(ROOT / "recipes" / f"{name}.toml", small)
    with traced(recording=False, until=until) as walk:

        def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
            walk.recording = phase.endswith("RL") and step == 1

        ludus.train(recipe, on_step=on_step, progress=False)
    return walk


async def _sandboxed_call() -> Walk:
    """A tool call that runs code, in a sandbox that is warm."""
    from ludus.core.messages import ToolCall, ToolContext
    from ludus.core.task import Task
    from ludus.sandbox import close_shared_sandboxes
    from ludus.tools.library import build_toolset

    tools, context = build_toolset(["python"]), ToolContext("walk", Task.of("Count."))
    try:
        await tools.call(ToolCall("python", {"code": "print(1)"}), context)
        with traced() as walk:
            result = await tools.call(ToolCall("python", {"code": "print(6 * 7)"}), context)
        assert "42" in str(result), result
        return walk
    finally:
        await close_shared_sandboxes()
