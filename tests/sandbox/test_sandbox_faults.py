"""Whose doing it is that a session is gone: the code's, which is a result, or ours, which is an error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from itertools import islice
from pathlib import Path

import pytest

from ludus.core import Fault, InfraError, Task, ToolCall, ToolContext
from ludus.sandbox import (
    Limits,
    Outcome,
    Sandbox,
    SandboxConfig,
    SandboxError,
    Session,
    SessionEnded,
    SessionLost,
    close_shared_sandboxes,
    shared_sandbox,
)
from ludus.sandbox.guest import watch
from ludus.sandbox.processes import isolation, machine
from ludus.sandbox.processes.machine import ControlGroup
from ludus.sandbox.processes.worker import SandboxWorker
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
        os.kill(box.backend.workers[0].pid, 9)
        with pytest.raises(SessionLost):
            for _ in range(100):
                await session.python("1")
                await asyncio.sleep(0.02)
        await session.close()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group whose counter of ended processes the test writes itself."""
    (tmp_path / "memory.events").write_text("low 0\nmax 7\noom 0\noom_kill 0\noom_group_kill 0\n")
    monkeypatch.setattr(isolation, "make_group", lambda: ControlGroup([tmp_path], 1 << 30))
    return tmp_path / "memory.events"


def below(pid: int) -> list[int]:
    """The processes that `pid` started, and those that these did, the oldest first."""
    return watch.tree(pid)[1:]


def kernel_ends(box: Sandbox, group: Path | None) -> None:
    """What the kernel does when the group is full: the youngest process goes, and is counted."""
    if group is not None:
        group.write_text("oom 1\noom_kill 1\noom_group_kill 0\n")
    os.kill(below(box.backend.workers[0].pid)[-1], 9)


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        "import subprocess, sys; sys.exit(137 if subprocess.run(['sleep', '60']).returncode else 0)",
    ],
    ids=["itself", "a program of its"],
)
async def test_memory_that_others_used_up_is_not_charged_to_the_code(group: Path, code: str) -> None:
    async with Sandbox(SandboxConfig(workers=1)) as box, await box.session() as session:
        running = asyncio.create_task(session.python(code))
        await asyncio.sleep(1.0)
        kernel_ends(box, group)
        with pytest.raises(SessionLost, match="all sessions together") as lost:
            await running
        assert isinstance(lost.value, InfraError) and lost.value.replay
        assert not session.alive and not session.was_ended_inside
        with pytest.raises(SessionLost):
            await session.python("1")


async def test_an_idle_session_that_makes_room_for_others_is_not_charged(group: Path) -> None:
    async with Sandbox(SandboxConfig(workers=1)) as box, await box.session() as session:
        await session.python("x = 1")
        kernel_ends(box, group)
        for _ in range(500):
            if not session.alive:
                break
            await asyncio.sleep(0.01)
        assert not session.alive and not session.was_ended_inside
        with pytest.raises(SessionLost, match="all sessions together"):
            await session.python("x")


async def test_an_execution_that_made_room_for_others_is_run_again(group: Path) -> None:
    async with Sandbox(SandboxConfig(workers=1)) as box:
        running = asyncio.create_task(box.python("import time; time.sleep(2); print('done')"))
        await asyncio.sleep(1.0)
        kernel_ends(box, group)
        assert (await running).stdout == "done\n"


@pytest.mark.parametrize("alone", [True, False], ids=["it may fill the group", "nobody was counted"])
async def test_otherwise_a_kill_is_a_result(group: Path, alone: bool) -> None:
    limits = Limits(memory_mb=2048) if alone else Limits()
    async with Sandbox(SandboxConfig(workers=1)) as box, await box.session(limits=limits) as session:
        running = asyncio.create_task(session.python("import time; time.sleep(60)"))
        await asyncio.sleep(1.0)
        kernel_ends(box, group if alone else None)
        said = await running
        assert said.lost and said.outcome is Outcome.KILLED and said.signal == "SIGKILL"


def has_swap() -> bool:
    return len(Path("/proc/swaps").read_text().splitlines()) > 1


async def test_the_kernel_counts_whom_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real group: sessions that are each within their limits, and too many."""
    monkeypatch.setattr(machine, "_memory_bytes", lambda root: 400 << 20)
    fill = "block = bytearray(150 << 20)\nimport time\ntime.sleep(0.3)\nlen(block)"
    async with Sandbox(SandboxConfig(workers=1, limits=Limits(memory_mb=256))) as box:
        assert box.layers is not None
        if not box.layers.active["control group"] or has_swap():
            pytest.skip("this user may make no control group, or the kernel would swap instead")
        sessions = [await box.session() for _ in range(4)]
        said = await asyncio.gather(*(s.python(fill) for s in sessions), return_exceptions=True)
        lost = [one for one in said if isinstance(one, SessionLost)]
        assert lost and all(
            "all sessions together" in str(one) or "interpreter" in str(one) for one in lost
        )
        assert all(isinstance(one, SessionLost) or one.ok for one in said)
        for session in sessions:
            await session.close()


async def test_a_session_that_spins_while_nothing_runs_is_ended_and_a_quiet_one_is_not() -> None:
    limits = Limits(cpu_seconds=1.0)

    async def spins(session: Session) -> None:
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

    async def is_quiet(session: Session) -> None:
        for _ in range(12):
            assert (await session.python("sum(range(10**5))")).ok
            await asyncio.sleep(0.25)

    async with (
        Sandbox(SandboxConfig(workers=1)) as box,
        await box.session(limits=limits) as one,
        await box.session(limits=limits) as other,
    ):
        await asyncio.gather(spins(one), is_quiet(other))


async def test_a_worker_that_dies_after_it_was_chosen_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Sandbox(SandboxConfig(workers=1)) as box:
        choose, chosen = box.backend._acquire_start, iter([True])

        async def choose_and_kill() -> SandboxWorker:
            worker = await choose()
            if next(chosen, False):
                os.kill(worker.pid, 9)
                while worker.is_alive:  # noqa: ASYNC110 - nobody tells us
                    await asyncio.sleep(0.01)
            return worker

        monkeypatch.setattr(box.backend, "_acquire_start", choose_and_kill)
        async with asyncio.timeout(30):
            assert (await box.python("1 + 1")).value == "2"


async def test_a_worker_that_dies_while_others_start_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, doomed = SandboxWorker.start, iter([True])

    async def start_and_die(worker: SandboxWorker) -> object:
        told = await start(worker)
        if next(doomed, False):
            os.kill(worker.pid, 9)
            while worker.is_alive:  # noqa: ASYNC110 - nobody tells us
                await asyncio.sleep(0.01)
        return told

    before = children()
    async with Sandbox(SandboxConfig(workers=1)) as box:
        box.backend.config = box.config.model_copy(update={"workers": 3})
        monkeypatch.setattr(SandboxWorker, "start", start_and_die)
        with pytest.raises(SandboxError, match="as soon as it had started"):
            await box.backend.start()
        assert len(box.backend.workers) == 2
        assert (await box.python("1 + 1")).value == "2"
        assert len(box.backend.workers) == 3 and all(worker.is_alive for worker in box.backend.workers)
    assert children() - before == set()


@pytest.mark.parametrize("bare", [False, True], ids=["namespaces", "bare"])
async def test_a_start_that_is_cancelled_leaves_nothing(
    bare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arrange(monkeypatch, bare=bare)
    before, spent = children(), 0.0
    while spent < 1.0:
        box = Sandbox(SandboxConfig(workers=2))
        start = asyncio.create_task(box.start())
        await asyncio.sleep(spent)
        start.cancel()
        await asyncio.wait([start])
        await box.close()
        assert children() - before == set()
        assert names_in(tmp_path) == []
        spent = 2 * spent + 0.01


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def arrange(monkeypatch: pytest.MonkeyPatch, *, bare: bool) -> None:
    arrangements = isolation.arrangements
    if bare:
        monkeypatch.setattr(
            isolation, "arrangements", lambda *given: islice(arrangements(*given), 1, None)
        )


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
