"""Whose doing it is that a session is gone: the code's, which is a result, or ours, which is an error."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from ludus.core.failures import Fault, InfraError
from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.core.tooling import ToolContext
from ludus.sandbox import (
    Limits,
    Outcome,
    Sandbox,
    SandboxConfig,
    SessionEnded,
    SessionLost,
    close_shared_sandboxes,
    shared_sandbox,
)
from ludus.tools.library import build_toolset

SOON = "import os, threading; threading.Timer(0.05, os._exit, (5,)).start()"


def children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


async def test_code_that_ends_its_session_later_is_told_so() -> None:
    async with Sandbox(SandboxConfig(workers=1)) as box:
        session = await box.session()
        await session.python(SOON)
        await asyncio.sleep(0.5)
        assert session.was_ended_inside and not session.alive
        said = await session.python("1")
        assert said.lost and said.outcome is Outcome.EXITED and said.exit_code == 5
        with pytest.raises(SessionEnded):
            await session.read("x")
        await session.close()
        with pytest.raises(SessionLost):
            await session.python("1")


async def test_a_model_cannot_make_its_own_failure_ours() -> None:
    tools, context = build_toolset(["python", "bash"]), ToolContext("e", Task.of("t", id="t"))
    await tools.open(context)
    await tools.call(ToolCall("python", {"code": SOON}), context)
    await asyncio.sleep(0.5)
    result = await tools.call(ToolCall("python", {"code": "print('again')"}), context)
    assert result.fault is None and "again" in result.content and "new session" in result.content
    await tools.close(context)
    await close_shared_sandboxes()


async def test_a_cancelled_execution_is_nobody_elses_doing() -> None:
    tools, context = build_toolset(["python"]), ToolContext("e", Task.of("t", id="t"))
    await tools.open(context)
    call = asyncio.create_task(tools.call(ToolCall("python", {"code": "while True: pass"}), context))
    await asyncio.sleep(0.3)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    try:
        result = await tools.call(ToolCall("python", {"code": "1"}), context)
        assert result.fault is not Fault.TOOL_RAISED
    except InfraError as error:
        assert error.replay
    await tools.close(context)
    await close_shared_sandboxes()


async def test_a_worker_that_dies_is_our_doing() -> None:
    async with Sandbox(SandboxConfig(workers=1)) as box:
        session = await box.session()
        os.kill(box._workers[0].pid, 9)
        with pytest.raises(SessionLost):
            for _ in range(100):
                await session.python("1")
                await asyncio.sleep(0.02)
        await session.close()


async def test_a_session_that_spins_while_nothing_runs_is_ended() -> None:
    limits = Limits(cpu_seconds=1.0)
    async with Sandbox(SandboxConfig(workers=1)) as box, await box.session(limits=limits) as session:
        await session.python(
            "import threading\ndef spin():\n    while True: pass\n"
            "threading.Thread(target=spin, daemon=True).start()"
        )
        for _ in range(200):
            if not session.alive:
                break
            await asyncio.sleep(0.1)
        said = await session.python("1")
        assert said.lost and said.outcome is Outcome.CPU


async def test_quiet_sessions_are_left_alone() -> None:
    limits = Limits(cpu_seconds=1.0)
    async with Sandbox(SandboxConfig(workers=1)) as box, await box.session(limits=limits) as session:
        for _ in range(12):
            assert (await session.python("sum(range(10**5))")).ok
            await asyncio.sleep(0.25)


def test_event_loops_that_are_closed_leave_no_workers() -> None:
    async def run() -> None:
        assert (await shared_sandbox(SandboxConfig(workers=1)).python("1")).ok

    before = children()
    for _ in range(4):
        asyncio.run(run())
    assert len(children() - before) <= 2
    asyncio.run(run_and_close())
    assert children() - before == set()


async def run_and_close() -> None:
    shared_sandbox(SandboxConfig(workers=1))
    await close_shared_sandboxes()


async def test_what_is_no_command_is_refused() -> None:
    async with Sandbox(SandboxConfig(workers=1)) as box:
        with pytest.raises(ValueError, match="list of words"):
            await box.run("ls -la")
        with pytest.raises(TypeError, match="text"):
            await box.python(b"1")  # type: ignore[arg-type]
