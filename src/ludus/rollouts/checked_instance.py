"""An instance as the clauses of the contract use it: started, given bad calls, closed, and measured."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ludus.core.failures import LudusError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.core.task import Task
from ludus.core.user_code import error_with_location
from ludus.envs import EnvTools, as_step, call_env, reset_env, takes_text, tools_of
from ludus.envs.isolated import IsolatedEnv
from ludus.envs.tools import StepTool
from ludus.remote.threads import DeadlineExceeded
from ludus.rollouts.agent import random_call
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

_SECONDS = 45.0
"""How long resetting an instance may take at the first look."""
_STEP_SECONDS = 20.0
"""How long an action may take there. A run has more patience (`step_timeout`), a person has less."""
_LEAK_MB = 16.0
"""Growth over the second half of the episodes that an allocator may have by chance."""

_count = count()


Action = str | ToolCall
Story = list[tuple[Any, ...]]
"""The first observation, then for each call its name, arguments, content, reward, ending and fault."""


class Broken(Exception):
    """A clause does not hold; the text says why."""


class CheckedInstance:
    """An environment, or what an episode has of tools without one, from episode to episode."""

    def __init__(self, name: str, env: Any, tools: ToolSet | None) -> None:
        self.name, self.env = name, env
        self._own_tools = tools
        self._open: ToolContext | None = None

    async def start(self, task: Task) -> tuple[Any, ToolSet, ToolContext, Sequence[ToolSpec]]:
        """What a reset shows, and what the agent has from then on."""
        tools = self._own_tools
        if tools is None:
            return await reset_env(self.env, task, self.name), *await self.offered(task)
        await self.close()
        self._open = context = ToolContext(f"check {next(_count)}", task)
        await tools.open(context)
        return None, tools, context, await tools.list(context)

    async def offered(self, task: Task) -> tuple[ToolSet, ToolContext, Sequence[ToolSpec]]:
        """The tools of the environment, after its reset."""
        tools = EnvTools(self.env, await tools_of(self.env, self.name))
        context = ToolContext("check", task, {self.name: self.env})
        return tools, context, await tools.list(context)

    async def reset(self, task: Task) -> None:
        """A reset at the first look, which says where it hangs."""
        try:
            await reset_env(self.env, task, self.name, timeout=_SECONDS)
        except TimeoutError as error:
            raise Broken(f"reset {_late(error, _SECONDS)}") from error

    async def offered_actions(self, specs: Sequence[ToolSpec]) -> list[Action]:
        """The first of `available_actions()`; or tools without arguments; or calls that schemas allow."""
        has_step = takes_text(self.env)
        texts = await call_env(self.env.available_actions, timeout=_SECONDS)
        if texts and has_step:
            return [str(texts[0])]
        if ready := [ToolCall(spec.name) for spec in specs if not spec.parameters.get("required")]:
            return list(ready)
        tools = [spec for spec in specs if not (has_step and spec.name == StepTool.name)]
        calls = [ToolCall(spec.name, example_of(spec.parameters, 0)) for spec in tools]
        return [*calls, *(["look"] if has_step else [])]

    async def act(self, action: Action, tools: ToolSet, context: ToolContext) -> ToolResult:
        """An action at the first look: a text for `step` itself, or a call."""
        what = f"step({action!r})" if isinstance(action, str) else f"the tool {action.name!r}"
        try:
            if isinstance(action, str):
                step = await call_env(self.env.step, action, timeout=_STEP_SECONDS)
                return as_step(step).as_result()
            async with asyncio.timeout(_STEP_SECONDS):
                return await tools.call(action, context)
        except TimeoutError as error:
            raise Broken(f"{what} {_late(error, _STEP_SECONDS)}") from error
        except Exception as error:
            told = str(error) if isinstance(error, LudusError) else error_with_location(error)
            raise Broken(f"{what} failed: {told:.600}; return a Step, or raise ToolFault") from error

    async def walk(
        self, task: Task, actions: Sequence[Action] | None, turns: int, *, starts: bool = True
    ) -> Story:
        """What was seen in an episode: of the given actions, or of random ones, the same each time."""
        seen: Any = None
        if starts:
            seen, tools, context, specs = await self.start(task)
        else:
            tools, context, specs = await self.offered(task)
        story: Story = [(seen,)]
        draw = random.Random(task.id)
        for number in range(len(actions) if actions is not None else turns if specs else 0):
            if actions is None:
                call = await random_call(self.env, specs, draw)
            else:
                action = actions[number]
                call = ToolCall("step", {"action": action}) if isinstance(action, str) else action
            result = await tools.call(call, context)
            seen = result.content, result.reward, result.terminated, result.fault
            story.append((call.name, call.arguments, *seen))
            if result.terminated:
                break
        return story

    async def close(self) -> None:
        """Closing twice does no harm."""
        if self._own_tools is None:
            await call_env(self.env.close)
        elif self._open is not None:
            await self._own_tools.close(self._open)


def _late(error: TimeoutError, seconds: float) -> str:
    where = (
        f": it was at {error.place} then" if isinstance(error, DeadlineExceeded) and error.place else ""
    )
    how = "let it end; a run waits as long as agent.pools.NAME says (step_timeout, reset_timeout)"
    return f"did not return within {seconds:g} s{where}; {how}"


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


def compare_stories(expected: Story, found: Story, task: Task, where: str) -> None:
    """`Broken` where an instance went another way than one before."""
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            what = "the first observation" if number == 0 else f"action {number} ({one[0]} {one[1]})"
            raise Broken(
                f"task {task.id!r}: {what} led to something else {where}: {one[-4:]!r:.300} against "
                f"{other[-4:]!r:.300}; reset all of the state, and draw random numbers from the task"
            )
    if len(expected) != len(found):
        raise Broken(f"task {task.id!r}: {len(expected)} against {len(found)} observations {where}")


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


def shared_state(one: Any, other: Any) -> list[str]:
    """Attributes in which two instances hold the same list, dict or set, which an episode may change."""

    def held(env: Any, name: str) -> Any:
        value = vars(env).get(name, vars(type(env)).get(name))
        return value if isinstance(value, (list, dict, set, bytearray)) else None

    names = [name for name in dict.fromkeys([*vars(one), *vars(type(one))]) if not name.startswith("__")]
    return [
        name for name in names if (found := held(one, name)) is not None and held(other, name) is found
    ]
