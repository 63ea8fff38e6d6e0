"""What `ludus check sandbox` does: start one, try its doors, run a little of everything, and say what holds."""

from __future__ import annotations

import asyncio
import statistics
import time

from ludus.core.failures import LudusError
from ludus.sandbox import CannotFork, Limits, Outcome, Sandbox, SandboxConfig

Findings = list[tuple[str, str]]
_ROUNDS = 20
_LIMITS = Limits(wall_seconds=2.0, cpu_seconds=2.0, memory_mb=128, processes=32)
# what must stop each of these programs
_STOPPED = {
    "endless loop": ("while True: pass", {Outcome.TIMEOUT, Outcome.CPU}),
    "memory bomb": ("x = bytearray(3 << 30)", {Outcome.MEMORY}),
    "endless output": ("while True: print('x' * 100_000)", {Outcome.OUTPUT, Outcome.TIMEOUT}),
    "fork bomb": (
        "import os, time\nwhile True:\n    os.fork() or time.sleep(9)",
        {Outcome.RAISED, Outcome.PROCESSES, Outcome.TIMEOUT},
    ),
    "full disk": ("f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))", {Outcome.RAISED}),
}


def sandbox_findings(preload: tuple[str, ...], network: bool) -> Findings:
    """Which layers are active, which doors are closed, and whether limits stop what they should."""
    return asyncio.run(_findings(SandboxConfig(preload=preload, network=network, accept_risk=True)))


async def _findings(config: SandboxConfig) -> Findings:
    sandbox = Sandbox(config)
    try:
        layers = await sandbox.start()
        found: Findings = []
        for name, is_active in layers.active.items():
            reason = layers.reasons.get(name) or layers.reasons.get("namespaces", "")
            found.append(("info", f"{name}: on") if is_active else ("warning", f"{name}: off. {reason}"))
        for door, error in layers.doors.items():
            found.append(
                ("info", f"{door}: closed ({error})")
                if error
                else ("error", f"{door}: open to code inside; it is refused unless accept_risk = true")
            )
        found += await _limits(sandbox)
        found += await _speed(sandbox)
        return found
    except LudusError as error:
        return [("error", str(error))]
    finally:
        await sandbox.close()


async def _limits(sandbox: Sandbox) -> Findings:
    programs = list(_STOPPED.items())
    results = await asyncio.gather(*(sandbox.python(code, limits=_LIMITS) for _, (code, _) in programs))
    return [
        ("info" if result.outcome in expected else "error", f"{name}: {result.outcome}")
        for (name, (_, expected)), result in zip(programs, results, strict=True)
    ]


async def _speed(sandbox: Sandbox) -> Findings:
    fresh = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        await sandbox.python("print('hello world')")
        fresh.append(time.perf_counter() - started)
    async with await sandbox.session() as session:
        statements = [(await session.python("x = 1")).seconds for _ in range(_ROUNDS)]
        started = time.perf_counter()
        try:
            async with await session.fork():
                fork = f"{(time.perf_counter() - started) * 1000:.1f} ms"
        except CannotFork as refused:
            fork = f"refused ({refused.reason})"
    return [
        (
            "info",
            f"median of a fresh execution {statistics.median(fresh) * 1000:.1f} ms, of a statement in a "
            f"session {statistics.median(statements) * 1000:.2f} ms; fork of a session {fork}",
        )
    ]
