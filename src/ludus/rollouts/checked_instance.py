"""An instance as the clauses of the contract use it: started, given bad calls, closed, and measured."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ludus.core.messages import ToolCall, ToolContext, ToolSet, ToolSpec
from ludus.core.task import Task
from ludus.envs import EnvTools, call_env, reset_env, tools_of
from ludus.envs.isolated import IsolatedEnv
from ludus.tools import example_of

BAD_TEXTS = {
    "an unknown action": "no such action",
    "nothing": "",
    "spaces": " \n\t ",
    "unicode": "göh \U0001f600 \u202e\u0645\u0631 \ufdfa",
    "control characters": "\x00\x1b[2J\x07\r",
    "a lone surrogate": "\ud800",
    "1 MB of text": "x" * 2**20,
}
"""Arguments that a model may come up with."""

_LEAK_MB = 16.0
"""Growth over the second half of the episodes that an allocator may have by chance."""

_count = count()


class CheckedInstance:
    """An environment, or what an episode has of tools without one, from episode to episode."""

    def __init__(self, name: str, env: Any, tools: ToolSet | None) -> None:
        self.name, self.env = name, env
        self._own_tools = tools
        self._open: ToolContext | None = None

    async def start(self, task: Task) -> tuple[Any, ToolSet, ToolContext, Sequence[ToolSpec]]:
        """What a reset shows, and what the agent has from then on."""
        tools = self._own_tools
        if tools is not None:
            await self.close()
            seen, context = None, ToolContext(f"check {next(_count)}", task)
            await tools.open(context)
            self._open = context
        else:
            seen = await reset_env(self.env, task, self.name)
            tools = EnvTools(self.env, await tools_of(self.env, self.name))
            context = ToolContext("check", task, {self.name: self.env})
        return seen, tools, context, await tools.list(context)

    async def close(self) -> None:
        """Closing twice does no harm."""
        if self._own_tools is None:
            await call_env(self.env.close)
        elif self._open is not None:
            await self._own_tools.close(self._open)


def bad_calls(specs: Sequence[ToolSpec]) -> list[tuple[str, ToolCall]]:
    """Calls that a model may make by mistake, for each tool."""
    calls = [("an unknown tool", ToolCall("no_such_tool", {}))]
    for spec in specs:
        properties = spec.parameters.get("properties", {})
        texts = [name for name, schema in properties.items() if schema.get("type") == "string"]
        for argument in texts:
            usual = example_of(spec.parameters, 0)
            calls += [
                (what, ToolCall(spec.name, {**usual, argument: t})) for what, t in BAD_TEXTS.items()
            ]
        wrong = {name: [{"x": None}] for name in properties}
        calls += [
            ("nothing at all", ToolCall(spec.name, {})),
            ("a wrong type", ToolCall(spec.name, wrong)),
            ("an unknown argument", ToolCall(spec.name, {"no_such_argument": 1})),
        ]
    return calls


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Resources of this process and of an isolated environment's."""

    megabytes: float
    files: int
    threads: int

    @classmethod
    def of(cls, env: Any) -> ResourceUsage:
        gc.collect()
        folders = [Path("/proc/self")]
        if not folders[0].is_dir():  # no Linux
            return cls(0.0, 0, threading.active_count())
        pages = int((folders[0] / "statm").read_text().split()[1])
        megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        if type(env) is IsolatedEnv:
            megabytes += env.memory_mb()
            folders.append(Path(f"/proc/{env.process_id}"))
        counts = [sum(len(list((one / what).iterdir())) for one in folders) for what in ("fd", "task")]
        return cls(megabytes, *counts)

    def __sub__(self, other: ResourceUsage) -> str:
        return (
            f"{self.megabytes - other.megabytes:+.1f} MB, {self.files - other.files:+d} open files, "
            f"{self.threads - other.threads:+d} threads"
        )

    def leaks_since(self, other: ResourceUsage, episodes: int) -> bool:
        few = max(2, episodes // 10)  # a leak is one of every episode
        return (
            self.megabytes - other.megabytes > _LEAK_MB
            or self.files - other.files > few
            or self.threads - other.threads > few
        )
