"""Threads that block nobody, and processes that can be killed."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from ludus.remote.processes import NotPicklable, ProcessExecutor
from ludus.remote.threads import (
    DeadlineExceeded,
    FunctionExited,
    ThreadExecutor,
    WorkerError,
    run_sync,
)

who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


async def until(condition, seconds: float = 20.0) -> None:
    """Wait for something that must happen; the guard is generous."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


async def test_a_sync_function_gives_its_result_and_its_own_exception():
    assert await run_sync(pow, 2, 10) == 1024
    assert await run_sync(int, "12", base=3) == 5
    with pytest.raises(ZeroDivisionError):
        await run_sync(lambda: 1 // 0)


async def test_the_function_sees_the_callers_context_variables():
    who.set("me")
    assert await run_sync(who.get) == "me"


@pytest.mark.parametrize("exit_with", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_an_exit_inside_the_function_does_not_end_us(exit_with):
    def leave():
        raise exit_with

    with pytest.raises(FunctionExited, match=type(exit_with).__name__):
        await run_sync(leave)


async def test_a_function_that_raises_timeout_error_differs_from_one_past_its_deadline():
    def raises():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError) as own:
        await run_sync(raises, timeout=30)
    assert not isinstance(own.value, DeadlineExceeded)


async def test_a_stuck_thread_is_abandoned_replaced_and_forgotten_when_it_ends():
    executor = ThreadExecutor(1)
    let_go = threading.Event()
    with pytest.raises(DeadlineExceeded):
        await executor.run(let_go.wait, timeout=0.05)
    assert executor.abandoned == 1
    assert await executor.run(lambda: "next", timeout=20) == "next"
    let_go.set()
    await until(lambda: executor.abandoned == 0)
    await executor.close()
    await until(lambda: executor.workers == 0)


async def test_time_in_the_queue_is_not_charged_to_the_function():
    executor = ThreadExecutor(1)
    jobs = [executor.run(time.sleep, 0.15, timeout=0.3) for _ in range(4)]
    await asyncio.gather(*jobs)  # the last one waits longer than its deadline
    await executor.close()


async def test_stuck_threads_are_bounded_with_an_error_that_names_the_fix():
    executor = ThreadExecutor(4, max_abandoned=2)
    let_go = threading.Event()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await executor.run(let_go.wait, timeout=0.01)
    with pytest.raises(WorkerError, match="process=True"):
        await executor.run(int)
    let_go.set()
    await executor.close()


async def test_a_cancelled_caller_leaves_the_queue():
    executor = ThreadExecutor(1)
    let_go, ran = threading.Event(), []
    busy = asyncio.create_task(executor.run(let_go.wait))
    await asyncio.sleep(0)
    queued = asyncio.create_task(executor.run(ran.append, 1))
    await asyncio.sleep(0.01)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    let_go.set()
    await busy
    assert await executor.run(lambda: "free") == "free"
    assert ran == []
    await executor.close()


async def test_a_closed_executor_refuses_work_and_wakes_those_who_wait():
    executor = ThreadExecutor(1)
    let_go = threading.Event()
    busy = asyncio.create_task(executor.run(let_go.wait))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(executor.run(int))
    await asyncio.sleep(0.01)
    await executor.close()
    with pytest.raises(WorkerError):
        await waiting
    with pytest.raises(WorkerError):
        await executor.run(int)
    let_go.set()
    await busy


def test_one_executor_serves_several_event_loops_at_once():
    executor = ThreadExecutor(2)
    results: list[int] = []

    async def some(base: int) -> None:
        jobs = [executor.run(lambda n=n: n, timeout=20) for n in range(base, base + 50)]
        results.extend(await asyncio.gather(*jobs))

    threads = [threading.Thread(target=lambda b=b: asyncio.run(some(b))) for b in (0, 50, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == list(range(150))


def test_a_hung_thread_does_not_hold_up_the_exit_of_the_interpreter():
    code = """
    import asyncio, time
    from ludus.remote.threads import run_sync
    async def main():
        try:
            await run_sync(time.sleep, 3600, timeout=0.05)
        except TimeoutError:
            print("gone on")
    asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, "gone on\n")


# Processes ----------------------------------------------------------------------------------------


@pytest.fixture
async def processes():
    executor = ProcessExecutor(2)
    yield executor
    await executor.close()


async def test_a_process_gives_results_and_exceptions_and_is_used_again(processes):
    first, second = await processes.run(os.getpid), await processes.run(os.getpid)
    assert first == second != os.getpid()
    with pytest.raises(ZeroDivisionError):
        await processes.run(divmod, 1, 0)
    assert await processes.run(os.getpid) == first


async def test_a_process_that_exits_or_is_killed_is_our_failure_and_is_replaced(processes):
    with pytest.raises(WorkerError, match="status 7"):
        await processes.run(os._exit, 7)
    pid = await processes.run(os.getpid)
    busy = asyncio.create_task(processes.run(time.sleep, 600))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        await busy
    assert await processes.run(os.getpid) != pid
    assert processes.lost == 2


async def test_sys_exit_in_a_process_is_not_ours(processes):
    with pytest.raises(FunctionExited):
        await processes.run(sys.exit, 3)


async def test_a_process_past_its_deadline_is_killed_even_inside_c_code(processes):
    pid = await processes.run(os.getpid)
    with pytest.raises(DeadlineExceeded):
        await processes.run(pow, 3, 10**9, timeout=0.2)
    await until(lambda: not is_running(pid))
    assert await processes.run(int, "5") == 5


async def test_cancelling_the_caller_kills_the_process(processes):
    pid = await processes.run(os.getpid)
    call = asyncio.create_task(processes.run(time.sleep, 600))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not is_running(pid))


async def test_closing_kills_the_busy_ones_too():
    executor = ProcessExecutor(1)
    pid = await executor.run(os.getpid)
    call = asyncio.create_task(executor.run(time.sleep, 600))
    await asyncio.sleep(0.2)
    await executor.close()
    with pytest.raises(WorkerError):
        await call
    await until(lambda: not is_running(pid))
    with pytest.raises(WorkerError):
        await executor.run(int)


async def test_what_cannot_be_pickled_is_said_at_once(processes):
    with pytest.raises(NotPicklable, match="top of a module"):
        await processes.run(lambda: 1)


def test_processes_die_with_a_parent_that_is_killed(tmp_path: Path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, os, signal, subprocess
            from pathlib import Path
            from ludus.remote.processes import ProcessExecutor

            def work(folder):
                child = subprocess.Popen(["sleep", "600"])
                Path(folder, "pids.tmp").write_text(f"{os.getpid()} {child.pid}")
                Path(folder, "pids.tmp").rename(Path(folder, "pids"))
                return pow(3, 10**9)  # holds the interpreter: no Python thread could act

            async def main(folder):
                call = asyncio.create_task(ProcessExecutor(1).run(work, folder))
                while not Path(folder, "pids").exists():
                    await asyncio.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

            if __name__ == "__main__":
                asyncio.run(main(str(Path(__file__).parent)))
            """
        )
    )
    assert subprocess.run([sys.executable, str(script)], timeout=40).returncode == -signal.SIGKILL
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    asyncio.run(until(lambda: not any(is_running(pid) for pid in pids)))


@pytest.mark.parametrize("work", ["work", "import_object(f'{__file__}:work')"])
def test_a_main_script_without_its_guard_is_told_so(tmp_path: Path, work: str):
    """Whether the worker runs it again as the main script, or as the file that a function was named by."""
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio
            from ludus.remote.processes import ProcessExecutor
            from ludus.core.registry import import_object

            def work():
                return 1

            async def main():
                executor = ProcessExecutor(1)
                try:
                    return await executor.run({work})
                finally:
                    await executor.close()

            if not __name__.startswith("ludus_user") or IS_WORKER:
                print(asyncio.run(main()))
            """
        ).replace("IS_WORKER", "'process_worker' in __import__('sys').argv[0]")
    )
    done = subprocess.run([sys.executable, str(script)], timeout=40, capture_output=True, text=True)
    assert done.returncode == 1
    assert '__name__ == "__main__"' in done.stderr


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
