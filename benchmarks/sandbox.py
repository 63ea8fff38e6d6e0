"""How fast the sandbox is, beside fresh interpreters in the same run. One command, under two minutes:

    python benchmarks/sandbox.py

Prints a Markdown table. Machines are noisy: what counts are the ratios within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ludus.sandbox import Limits, Sandbox, SandboxConfig, Session

HELLO = "print('hello world')"
CONCURRENCY = (1, 16, 256)
_LIMITS = Limits(wall_seconds=60, cpu_seconds=60, memory_mb=512, disk_mb=128, file_mb=128)

Row = tuple[str, ...]
Call = Callable[[], Awaitable[None]]

# the system's own: it starts fastest, and lies where bubblewrap and firejail can see it
PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable


async def paced(call: Call, at_once: int, seconds: float) -> tuple[float, float, float]:
    """Executions per second, and the median and 99th percentile of their milliseconds."""
    times: list[float] = []
    end = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            started = time.monotonic()
            await call()
            times.append(time.monotonic() - started)

    started = time.monotonic()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return len(times) / (time.monotonic() - started), *(milli(times, part) for part in (0.5, 0.99))


def milli(times: list[float], part: float) -> float:
    ordered = sorted(times)
    return 1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def subprocess_call(argv: list[str]) -> Call:
    async def call() -> None:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        out, _ = await process.communicate()
        assert out == b"hello world\n", argv

    return call


def sandbox_call(sandbox: Sandbox) -> Call:
    async def call() -> None:
        said = await sandbox.python(HELLO)
        assert said.stdout == "hello world\n", said.text()

    return call


def others() -> dict[str, list[str]]:
    """What people use instead, where it is installed."""
    found = {"fresh `python -c`": [PYTHON, "-I", "-c", HELLO]}
    if shutil.which("bwrap"):
        found["bubblewrap + `python`"] = [
            "bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-all",
            "--die-with-parent", PYTHON, "-I", "-c", HELLO,
        ]  # fmt: skip
    if shutil.which("firejail"):
        found["firejail + `python`"] = [
            "firejail",
            "--quiet",
            "--net=none",
            PYTHON,
            "-I",
            "-c",
            HELLO,
        ]
    return found


async def executions(seconds: float) -> list[Row]:
    """One-shot executions, ours and others', at several levels of concurrency."""
    rows: list[Row] = []
    rates: dict[int, float] = {}

    async def measure(name: str, call: Call) -> None:
        for at_once in CONCURRENCY:
            rate, median, last = await paced(call, at_once, seconds)
            base = rates.setdefault(at_once, rate)
            rows.append(
                (
                    name,
                    str(at_once),
                    f"{rate:.0f}/s",
                    f"{median:.1f} ms",
                    f"{last:.1f} ms",
                    f"{rate / base:.1f}x",
                )
            )

    for name, argv in others().items():
        await measure(name, subprocess_call(argv))
    preloads: list[tuple[str, ...]] = [()]
    if all(_is_installed(name) for name in ("numpy", "sympy")):
        preloads.append(("numpy", "sympy"))
    for preload in preloads:
        async with Sandbox(SandboxConfig(preload=preload, limits=_LIMITS)) as sandbox:
            name = f"sandbox, {' and '.join(preload)} preloaded" if preload else "sandbox"
            await measure(name, sandbox_call(sandbox))
            rows.append((f"{name}: memory", "-", f"{own_memory_mb():.0f} MB", "-", "-", "-"))
    return rows


def _is_installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


async def sessions(count: int) -> list[Row]:
    """Round trips in a session with few and with many alive, and what an idle one costs."""
    rows: list[Row] = []
    async with Sandbox(SandboxConfig(limits=_LIMITS)) as sandbox:
        first = await sandbox.session()
        rows.append(await round_trips("statement, 1 live session", first))
        before = own_memory_mb()
        started = time.monotonic()
        many = await asyncio.gather(*(sandbox.session() for _ in range(count)))
        opened = time.monotonic() - started
        for session in many[:: max(1, count // 50)]:
            await session.python("x = 1")
        each = (own_memory_mb() - before) / count
        rows.append(
            (f"opening {count} sessions", f"{count / opened:.0f}/s", "-", f"{each:.2f} MB each, idle")
        )
        rows.append(await round_trips(f"statement, {count} live sessions", first))
        started = time.monotonic()
        await asyncio.gather(*(session.close() for session in many))
        rows.append(
            (f"closing {count} sessions", f"{count / (time.monotonic() - started):.0f}/s", "-", "-")
        )
    return rows


async def round_trips(name: str, session: Session, count: int = 300) -> Row:
    times = []
    for number in range(count):
        started = time.monotonic()
        said = await session.python(f"{number} + 1")
        times.append(time.monotonic() - started)
        assert said.value == str(number + 1)
    return name, f"{milli(times, 0.5):.2f} ms", f"{milli(times, 0.99):.2f} ms", "-"


async def branches() -> list[Row]:
    """Forks, snapshots and restores of small and large sessions."""
    cases = {
        "nothing": "x = 1",
        "50 MB of variables": "x = [bytes([i % 256]) * 1_000_000 for i in range(50)]",
        "50 MB of files": "for i in range(50): open(f'f{i}', 'wb').write(b'x' * 1_000_000)",
    }
    rows: list[Row] = []
    async with Sandbox(SandboxConfig(limits=_LIMITS)) as sandbox:
        for name, code in cases.items():
            async with await sandbox.session() as session:
                said = await session.python(code)
                assert said.ok, said.text()
                rows.append(_median(f"fork, {name}", await _forks(session)))
                async with await session.snapshot() as snapshot:
                    times = []
                    for _ in range(10):
                        started = time.monotonic()
                        restored = await snapshot.restore()
                        times.append(time.monotonic() - started)
                        await restored.close()
                    rows.append(_median(f"restore, {name}", times))
    return rows


async def _forks(session: Session) -> list[float]:
    """Each fork after a statement, so that it is a fork of a new state."""
    times = []
    for number in range(10):
        await session.python(f"y = {number}")
        started = time.monotonic()
        fork = await session.fork()
        times.append(time.monotonic() - started)
        said = await fork.python("y")
        assert said.value == str(number)
        await fork.close()
    return times


def _median(name: str, times: list[float]) -> Row:
    return name, f"{1000 * statistics.median(times):.1f} ms", f"{1000 * max(times):.1f} ms", "-"


def own_memory_mb() -> float:
    """What this process and all below it occupy, pages that they share counted once."""
    total, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # it ended in the meantime
    return total / 1024


def table(head: Row, rows: list[Row]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


async def main() -> None:
    parser = argparse.ArgumentParser(description="speed of the sandbox")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line of the first table")
    parser.add_argument("--sessions", type=int, default=1000)
    given = parser.parse_args()
    head = ("`print('hello world')`", "at once", "rate", "p50", "p99", "to fresh")
    sys.stdout.write(table(head, await executions(given.seconds)) + "\n")
    rows = [*await sessions(given.sessions), *await branches()]
    sys.stdout.write(table(("sessions", "median", "p99 or max", "memory"), rows))


if __name__ == "__main__":
    asyncio.run(main())
