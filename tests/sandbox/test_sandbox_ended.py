"""Sessions that their own code hung or ended: every way in says so, and says that it was the code's doing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ludus.core import Fault, Task, ToolCall, ToolContext
from ludus.sandbox import (
    CannotFork,
    Limits,
    Outcome,
    Sandbox,
    SandboxConfig,
    Session,
    SessionEnded,
    SessionLost,
    close_shared_sandboxes,
)
from ludus.sandbox.guest import watch
from ludus.sandbox.processes import isolation
from ludus.sandbox.processes.guest_process import GuestProcess
from ludus.sandbox.processes.machine import ControlGroup
from ludus.tools.library import build_toolset

HANG = (
    "import re, threading, time\n"
    "def hold():\n    time.sleep(0.1)\n    re.match(r'(a+)+$', 'a' * 80 + 'b')\n"
    "threading.Thread(target=hold, daemon=True).start()"
)
EXIT = "import os; os._exit(1)"
LATER = "import os, threading; threading.Timer(0.05, os._exit, (3,)).start()"
FORGED = "import os, threading; threading.Timer(0.05, os.write, (3, b'\\0' * 8)).start()"
LIMITS = Limits(wall_seconds=1.0, cpu_seconds=30)
on_sandbox = pytest.mark.asyncio(loop_scope="module")
Use = Callable[[Session], Awaitable[Any]]
USES: dict[str, Use] = {
    "read": lambda session: session.read("x"),
    "write": lambda session: session.write("x", b"1"),
    "fork": lambda session: session.fork(),
    "snapshot": lambda session: session.snapshot(),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(SandboxConfig(workers=1)) as box:
        yield box


@on_sandbox
async def test_code_that_hangs_its_session_has_ended_it(box: Sandbox) -> None:
    async def hung(use: Use) -> None:
        async with await box.session(limits=LIMITS) as session:
            await session.python(HANG)
            await asyncio.sleep(0.4)
            with pytest.raises(SessionEnded) as ended:
                await use(session)
            assert ended.value.hung
            assert session.was_ended_inside and not session.alive
            said = await session.python("1")
            assert said.lost and said.outcome is Outcome.TIMEOUT
            with pytest.raises(SessionEnded):
                await session.read("x")

    await in_every_way(hung)


@pytest.mark.parametrize("code", [EXIT, LATER, FORGED], ids=["exits", "exits later", "forges frames"])
@on_sandbox
async def test_code_that_ended_its_session_is_told_so_by_all(box: Sandbox, code: str) -> None:
    async def told(use: Use) -> None:
        async with await box.session(limits=LIMITS) as session:
            await session.python(code)
            await asyncio.sleep(0.3)
            with pytest.raises((SessionEnded, CannotFork)):
                await use(session)
            with pytest.raises(SessionEnded):
                await use(session)

    await in_every_way(told)


async def in_every_way(check: Callable[[Use], Awaitable[None]]) -> None:
    """Check each use in a session of its own, all at once, since most of each is waiting."""
    found = await asyncio.gather(*(check(use) for use in USES.values()), return_exceptions=True)
    failed = {name: error for name, error in zip(USES, found, strict=True) if error is not None}
    assert not failed


@on_sandbox
async def test_a_snapshot_that_its_code_ended_is_the_codes_doing(box: Sandbox) -> None:
    async with await box.session(limits=LIMITS) as session:
        await session.python(
            "import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(1))\nsignal.alarm(1)"
        )
        async with await session.snapshot() as snapshot:
            await asyncio.sleep(1.5)
            with pytest.raises((SessionEnded, CannotFork)):
                await snapshot.restore()


@on_sandbox
async def test_a_snapshot_survives_a_restore_that_is_cancelled(box: Sandbox) -> None:
    async with await box.session() as session:
        await session.python("x = 1")
        async with await session.snapshot() as snapshot:
            for steps in range(6):
                restoring = asyncio.create_task(snapshot.restore())
                for _ in range(steps):
                    await asyncio.sleep(0)
                restoring.cancel()
                await asyncio.wait([restoring])
            async with await snapshot.restore() as again:
                assert (await again.python("x")).value == "1"


@on_sandbox
async def test_a_session_that_no_code_has_run_in_is_ours(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await box.session(limits=LIMITS.model_copy(update={"wall_seconds": 0.2}))
    never = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(GuestProcess, "ask", lambda *given, **named: never)
    with pytest.raises(SessionLost):
        await session.write("x", b"1")
    await session.close()


@on_sandbox
async def test_the_model_is_told_of_its_own_hang() -> None:
    tools = build_toolset(["python", "files"], sandbox=SandboxConfig(workers=1, limits=LIMITS))
    context = ToolContext("e", Task.of("t", id="t"))
    await tools.open(context)
    await tools.call(ToolCall("python", {"code": HANG}), context)
    await asyncio.sleep(0.4)
    result = await tools.call(ToolCall("view_file", {"path": "x"}), context)
    assert result.fault is Fault.TOOL_TIMEOUT and "gone" in result.content
    result = await tools.call(ToolCall("python", {"code": "1"}), context)
    assert result.fault is None and "new session" in result.content
    await tools.close(context)
    await close_shared_sandboxes()


async def test_a_session_that_made_room_for_others_stays_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 0\n")
    monkeypatch.setattr(isolation, "make_group", lambda: ControlGroup([tmp_path], 1 << 30))
    async with Sandbox(SandboxConfig(workers=1)) as box, await box.session() as session:
        running = asyncio.create_task(session.python("import time; time.sleep(60)"))
        await asyncio.sleep(0.5)
        counter.write_text("oom_kill 1\n")
        os.kill(watch.tree(box.backend.workers[0].pid)[-1], 9)
        with pytest.raises(SessionLost, match="all sessions together"):
            await running
        await asyncio.sleep(1.0)  # longer than the closed link is left to itself
        uses: list[Use] = [lambda session: session.python("1"), *USES.values()]
        for use in uses:
            with pytest.raises(SessionLost, match="all sessions together"):
                await use(session)
        assert not session.was_ended_inside
