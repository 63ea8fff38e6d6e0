"""A run of all attacks, in random order and at the same time, with honest work between them.

Who waits for whom. At most `at_once` executions are under way, attacks and honest ones alike; each has a hang
guard far beyond its own limits. After each round everything must be back to what an idle sandbox has, and after
the end to what there was before it.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from attacks import cases_files, cases_interpreter, cases_kernel, cases_resources, cases_secrets
from attacks.case import Case
from attacks.host import Canaries, adopt_orphans, belongings
from ludus.sandbox import Execution, Limits, Sandbox, SandboxConfig, Session

CASES: list[Case] = [
    *cases_resources.CASES,
    *cases_secrets.CASES,
    *cases_files.CASES,
    *cases_interpreter.CASES,
    *cases_kernel.CASES,
]
_GUARD_SECONDS = 120.0
_SETTLE_SECONDS = 15.0
_DICE = "random numbers"


@dataclass
class Report:
    """What came of a campaign. It went well when `problems` is empty."""

    uid: int
    arrangement: str
    attacks: int = 0
    honest: int = 0
    seconds: float = 0.0
    slowest_honest: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Campaign:
    """One sandbox under attack."""

    def __init__(
        self,
        *,
        bare: bool,
        seed: int,
        at_once: int = 12,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`told` hears of each attack's beginning and end."""
        self.report = Report(os.getuid(), "bare" if bare else "namespaces")
        self._bare = bare
        self._told = told
        self._dice = random.Random(seed)
        self._at_once = asyncio.Semaphore(at_once)
        self._randoms: list[str] = []
        self._turns = 0
        self._steady: Session | None = None
        self._steady_lock = asyncio.Lock()

    async def run(self, cases: list[Case], rounds: int) -> Report:
        """All cases, `rounds` times over."""
        adopt_orphans()
        canaries = Canaries()
        try:
            before = belongings()
            started = time.monotonic()
            config = SandboxConfig(workers=2, limits=Limits(wall_seconds=30, cpu_seconds=30))
            async with Sandbox(config) as sandbox:
                await self._rounds(sandbox, canaries, cases, rounds)
            self.report.seconds = time.monotonic() - started
            self.report.problems += [
                f"left behind at the end: {one}" for one in belongings().beyond(before)
            ]
        finally:
            canaries.close()
        return self.report

    async def _rounds(
        self, sandbox: Sandbox, canaries: Canaries, cases: list[Case], rounds: int
    ) -> None:
        layers = await sandbox.start()
        if layers.settings["namespaces"] == self._bare:
            self.report.problems.append(f"not the arrangement that was wanted: {layers.reasons}")
        self._steady = await sandbox.session()
        await self._steady.python("turns = 0")
        idle = belongings()
        for _ in range(rounds):
            # without namespaces there are no slots: every program has a process of its own
            forked = [replace(c, kind="forked") for c in cases if c.kind == "python" and not self._bare]
            if rounds == 1:  # each program in a slot or in a process of its own, as the dice fall
                other = {c.name: c for c in forked if self._dice.random() < 0.5}
                cases, forked = [other.get(c.name, c) for c in cases], []
            work = [self._attack(sandbox, canaries, case) for case in (*cases, *forked)]
            work += [self._attack(sandbox, canaries, case) for case in cases if case.name == _DICE]
            work += [self._honest(sandbox) for _ in range(max(4, len(cases) // 4))]
            self._dice.shuffle(work)
            await asyncio.gather(*work)
            self.report.problems += canaries.problems()
            self.report.problems += [
                f"left behind after a round: {one}" for one in await _settled(sandbox, idle)
            ]
        if len(set(self._randoms)) != len(self._randoms):
            self.report.problems.append("equal random numbers in two runs")
        if sandbox.replaced:
            self.report.problems.append(f"{sandbox.replaced} workers died of it")
        await self._steady.close()

    async def _attack(self, sandbox: Sandbox, canaries: Canaries, case: Case) -> None:
        expect = case.expect if case.bare is None or not self._bare else case.bare
        if expect == "skip":
            if case.name not in self.report.skipped:
                self.report.skipped.append(case.name)
            return
        limits = sandbox.config.limits.model_copy(update=dict(case.limits))
        code = canaries.fill_in(case.code)
        async with self._at_once:
            self._told(f"begins: {case.name}")
            try:
                async with asyncio.timeout(_GUARD_SECONDS):
                    said = await _execution(sandbox, case, code, limits)
            except TimeoutError:
                self.report.problems.append(f"{case.name}: hangs")
                return
            except Exception as error:  # noqa: BLE001 - a limit reached must never be an exception out here
                self.report.problems.append(f"{case.name}: {type(error).__name__}: {error}")
                return
        self._told(f"ended: {case.name}: {said.outcome} after {said.seconds:.2f} s")
        self.report.attacks += 1
        outcomes = self.report.outcomes
        outcomes[said.outcome] = outcomes.get(said.outcome, 0) + 1
        problem = expect(said)
        if problem is not None:
            self.report.problems.append(f"{case.name}: {problem} | {_shown(said)}")
        if canaries.value in f"{said.stdout}{said.stderr}{said.value}{said.error}":
            self.report.problems.append(f"{case.name}: it has read a canary | {_shown(said)}")
        if case.name == _DICE:
            self._randoms += said.stdout.split()[1:]

    async def _honest(self, sandbox: Sandbox) -> None:
        number = self._dice.randrange(10**6)
        async with self._at_once:
            started = time.monotonic()
            try:
                async with asyncio.timeout(_GUARD_SECONDS):
                    problem = await self._honest_turn(sandbox, number)
            except Exception as error:  # noqa: BLE001 - told in the report
                problem = f"{type(error).__name__}: {error}"
            self.report.slowest_honest = max(self.report.slowest_honest, time.monotonic() - started)
        self.report.honest += 1
        if problem is not None:
            self.report.problems.append(f"honest work was disturbed: {problem}")

    async def _honest_turn(self, sandbox: Sandbox, number: int) -> str | None:
        """Several kinds of ordinary work, each with exactly one right result."""
        kind = number % 5
        if kind == 0:
            said = await sandbox.python(
                f"print(sum(i * i for i in range({number % 5000})))\nlen('done')"
            )
            right = (str(sum(i * i for i in range(number % 5000))) + "\n", "4")
        elif kind == 1:
            said = await sandbox.shell(
                f"echo $(({number} * 7)); cat given", files={"given": f"text {number}\n"}
            )
            right = (f"{number * 7}\ntext {number}\n", None)
        elif kind == 2:
            said = await sandbox.python("import sys\nsys.stdin.read()[::-1]", stdin=f"in {number}")
            right = ("", repr(f"in {number}"[::-1]))
        elif kind == 3:
            async with await sandbox.session() as session:
                await session.python(f"number = {number}")
                async with await session.fork() as twin, await session.snapshot():
                    said = await twin.python("number + 1")
            right = ("", str(number + 1))
        else:
            assert self._steady is not None
            async with self._steady_lock:
                said = await self._steady.python("turns += 1\nturns")
                self._turns += 1
                right = ("", str(self._turns))
        return (
            None
            if said.ok and (said.stdout, said.value) == right
            else f"{_shown(said)} instead of {right}"
        )


async def _execution(sandbox: Sandbox, case: Case, code: str, limits: Limits) -> Execution:
    if case.kind == "python":
        return await sandbox.python(code, stdin=case.stdin, limits=limits)
    if case.kind == "forked":  # programs that are given files do not run in a slot
        has_slots = sandbox.layers is not None and sandbox.layers.settings["namespaces"]
        files = {"/dev/shm/given": ""} if has_slots else None
        return await sandbox.python(code, stdin=case.stdin, limits=limits, files=files)
    if case.kind == "shell":
        return await sandbox.shell(code, stdin=case.stdin, limits=limits)
    return await sandbox.run(code.split(), stdin=case.stdin, limits=limits)


async def _settled(sandbox: Sandbox, idle: object) -> list[str]:
    """What an idle sandbox would not have. The kernel may need a moment to bury the dead."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        extra = belongings().beyond(idle)  # type: ignore[arg-type]
        if sandbox.alive > 1:
            extra.append(f"{sandbox.alive - 1} executions are alive")
        if not extra or time.monotonic() > deadline:
            return extra
        await asyncio.sleep(0.05)


def _shown(said: Execution) -> str:
    lines = said.text()[:100_000].splitlines()
    lines.sort(key=lambda line: not line.startswith("BREACH"))
    return f"{said.outcome} after {said.seconds:.2f} s: {chr(10).join(lines)[:1500]!r}"
