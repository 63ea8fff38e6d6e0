"""Tools that the servers under test host. Executions are counted in files, which survive any process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from ludus.core import Boundary, InfraError, ToolContext, ToolResult
from ludus.tools import tool

MEMORY: dict[str, list[str]] = {}


def _note(file: str, text: str) -> None:
    with Path(file).open("a") as lines:
        lines.write(f"{text}\n")


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
async def nap(seconds: float, file: str = "") -> str:
    """Sleep, and note the start, the end and a cancellation."""
    if file:
        _note(file, "start")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if file:
            _note(file, "cancelled")
        raise
    if file:
        _note(file, "end")
    return "rested"


@tool(timeout=0.2)
async def too_slow() -> str:
    """Never done in time."""
    await asyncio.sleep(60)
    return "never"


@tool
def blocking(seconds: float) -> str:
    """A sync tool."""
    time.sleep(seconds)
    return "done"


@tool(retries=0)
async def pay(file: str, seconds: float = 0.0) -> str:
    """Something that must not happen twice."""
    _note(file, f"paid by {os.getpid()}")
    await asyncio.sleep(seconds)
    return "paid"


@tool(retries=2)
async def look(file: str, seconds: float = 0.0) -> str:
    """Something that may happen twice."""
    _note(file, f"looked by {os.getpid()}")
    await asyncio.sleep(seconds)
    return "seen"


@tool
async def remember(value: str, context: ToolContext) -> str:
    """Keep a value for this episode."""
    MEMORY.setdefault(context.episode, []).append(value)
    return ",".join(MEMORY[context.episode])


@tool
async def about(context: ToolContext) -> dict[str, object]:
    """What a tool is told of its episode."""
    task = context.task
    return {
        "episode": context.episode,
        "task": task.id,
        "prompt": task.messages[0].content if task.messages else "",
        "target": task.target,
        "metadata": dict(task.metadata),
    }


@tool(max_chars=50_000_000)
async def big(chars: int) -> str:
    """A long text with characters of several bytes in it."""
    return ("0123456789abcdé\n" * (chars // 16 + 1))[:chars]


@tool
async def swallow(text: str, seconds: float) -> int:
    """Hold a text for a while."""
    await asyncio.sleep(seconds)
    return len(text)


@tool
async def finish() -> ToolResult:
    """End the episode."""
    return ToolResult("the end", reward=0.5, terminated=True)


@tool(retries=1)
async def broken() -> str:
    """Fails, by our fault."""
    raise InfraError(Boundary.SANDBOX, "no sandbox left")


@tool
async def raises(message: str) -> str:
    """Fails, by the model's fault."""
    raise ValueError(message)


@tool
async def who() -> int:
    """The process that runs this."""
    return os.getpid()


@tool(retries=0)
async def die(file: str) -> str:
    """Kill the process that runs this."""
    _note(file, "died")
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@tool(retries=2)
async def die_once(file: str) -> str:
    """Kill the process that runs this, the first time."""
    first = not Path(file).exists()  # noqa: ASYNC240 - a test may block for a moment
    _note(file, "tried")
    if first:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@tool(max_concurrency=1)
async def narrow(seconds: float) -> str:
    """One at a time."""
    await asyncio.sleep(seconds)
    return "through"


def wants_env(env: object) -> str:
    """Needs an environment."""
    return str(env)
