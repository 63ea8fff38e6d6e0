"""`ludus check sandbox`: attempts each escape from inside, and reports the layers and tiers that hold."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ludus.core.config import read_toml
from ludus.core.failures import ConfigError, LudusError
from ludus.sandbox import CannotFork, Limits, Outcome, Sandbox, SandboxConfig
from ludus.sandbox.config import BACKENDS
from ludus.sandbox.containers.backend import ContainerBackend

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


def sandbox_findings(preload: tuple[str, ...], network: bool, file: Path | None = None) -> Findings:
    """Which layers are active and doors closed, whether limits stop what they should, which tiers work."""
    if file is None:
        config = SandboxConfig(preload=preload, network=network, accept_risk=True)
        return asyncio.run(_sandbox_findings(config)) + asyncio.run(_tier_findings())
    table = read_toml(file)
    found = table.get("sandbox") or table.get("agent", {}).get("sandbox")
    if found is None:
        raise ConfigError(f"{file} has no table sandbox, and no agent.sandbox")
    config = SandboxConfig.parse(found, f"{file}, sandbox")
    check = _sandbox_findings if config.tier == "process" else _container_findings
    return asyncio.run(check(config))


async def _tier_findings() -> Findings:
    """Which engines of containers there are. A cluster is not asked, unless it is configured."""
    found: Findings = []
    for tier in ("docker", "podman"):
        engine = ContainerBackend(SandboxConfig(tier=tier))
        try:
            await engine.start()
            text = f"{engine.version} works; try it with an image by --config"
        except LudusError as error:
            text = f"not available: {error}"
        found.append(("info", f"tier {tier}: {text}"))
    kubectl = (
        "kubectl is installed; try it by --config" if shutil.which("kubectl") else "no kubectl here"
    )
    found.append(("info", f"tier kubernetes: {kubectl}"))
    others = sorted(BACKENDS.keys() - {"process", "docker", "podman", "kubernetes"})
    return [*found, *(("info", f"tier {name}: registered; try it by --config") for name in others)]


async def _container_findings(config: SandboxConfig) -> Findings:
    """Whether sessions in containers work, what stops their programs, and how fast they are."""
    sandbox, timed = Sandbox(config), Stopwatch()
    try:
        found: Findings = [
            ("info" if is_on else "warning", f"{name}: {'on' if is_on else 'off'}")
            for name, is_on in (await sandbox.start()).active.items()
        ]
        async with timed("start"):
            session = await sandbox.session(files={"a/b": "x"})
        async with session:
            for _ in range(5):
                async with timed("command"):
                    answer = await session.shell("cat a/b")
            found.append(("info" if answer.stdout == "x" else "error", f"a command: {answer.text()!r}"))
            for name, (command, expected) in _CONTAINER_LIMITS.items():
                said = await session.shell(command, wall_seconds=2.0)
                stopped = said.outcome in expected and session.alive
                found.append(("info" if stopped else "error", f"{name}: {said.outcome}"))
            if not config.network:
                reached = (await session.shell(_CONTAINER_NETWORK)).exit_code == 0
                text = "network: open to code inside" if reached else "network: closed"
                found.append(("error" if reached else "info", text))
            python = await session.python("6 * 7")
            text = (
                "works"
                if python.value == "42"
                else f"the tool python cannot be used: {python.text():.200}"
            )
            found.append(("info" if python.value == "42" else "warning", f"python: {text}"))
        return [*found, ("info", f"median seconds: {timed}")]
    except LudusError as error:
        return [("error", str(error))]
    finally:
        await sandbox.close()


# what must stop each of these commands, and leave the container alive
_CONTAINER_LIMITS = {
    "endless loop": ("while :; do :; done", {Outcome.TIMEOUT, Outcome.CPU}),
    "endless sleep": ("sleep 1000", {Outcome.TIMEOUT}),
    "memory bomb": ("x=a; while :; do x=$x$x; done", {Outcome.MEMORY, Outcome.KILLED, Outcome.RAISED}),
}
# bash's own connections: to a resolver of the world, and to the cluster's own address
_CONTAINER_NETWORK = (
    "timeout 3 bash -c ': > /dev/tcp/1.1.1.1/53' 2>/dev/null || timeout 3 bash -c "
    "': > /dev/tcp/$KUBERNETES_SERVICE_HOST/$KUBERNETES_SERVICE_PORT' 2>/dev/null"
)


class Stopwatch:
    """Durations by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    @asynccontextmanager
    async def __call__(self, name: str) -> AsyncIterator[None]:
        started = time.perf_counter()
        yield
        self._seconds.setdefault(name, []).append(time.perf_counter() - started)

    def __str__(self) -> str:
        return ", ".join(f"{name} {statistics.median(own):.2f}" for name, own in self._seconds.items())


async def _sandbox_findings(config: SandboxConfig) -> Findings:
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
        tried = [sandbox.python(code, limits=_LIMITS) for code, _ in _STOPPED.values()]
        for (name, (_, expected)), result in zip(
            _STOPPED.items(), await asyncio.gather(*tried), strict=True
        ):
            found.append(
                ("info" if result.outcome in expected else "error", f"{name}: {result.outcome}")
            )
        found += await _sandbox_speed(sandbox)
        return found
    except LudusError as error:
        return [("error", str(error))]
    finally:
        await sandbox.close()


async def _sandbox_speed(sandbox: Sandbox) -> Findings:
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
