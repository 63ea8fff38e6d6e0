"""`programs`: a program in any language, built if need be, run on inputs, and scored by its output.

The program sees its standard input and nothing else of a test; outputs are compared here, outside the
sandbox. It is built once, and runs for each case in the same session.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.task import Task
from ludus.rewards.code_tests.fault_attribution import BrokenTask, SandboxFactory, TimeBudget
from ludus.rewards.code_tests.test_cases import StdinCase, TestResult, TestsReward, code_of, parse_tests
from ludus.rewards.scores import Parts
from ludus.sandbox import Execution, Outcome, Sandbox, Session

_log = logging.getLogger(__name__)

_BUILD_SECONDS = 60.0
FILE, PROGRAM = "{file}", "{program}"
"""Placeholders in the commands of a language."""


@dataclass(frozen=True, slots=True)
class Language:
    """A source file's name, the command that builds it if one is needed, and the one that runs it."""

    name: str
    fences: tuple[str, ...]
    file: str
    run: tuple[str, ...]
    build: tuple[str, ...] | None = None

    def command(self, words: Sequence[str]) -> list[str]:
        return [word.replace(FILE, self.file).replace(PROGRAM, "./program") for word in words]


LANGUAGES: dict[str, Language] = {
    one.name: one
    for one in (
        Language("python", ("python", "py", "python3"), "program.py", ()),
        Language(
            "c",
            ("c",),
            "program.c",
            (PROGRAM,),
            ("gcc", "-O2", "-std=gnu17", "-w", "-o", PROGRAM, FILE, "-lm"),
        ),
        Language(
            "c++",
            ("c++", "cpp", "cc", "cxx"),
            "program.cpp",
            (PROGRAM,),
            ("g++", "-O2", "-std=gnu++17", "-w", "-o", PROGRAM, FILE, "-lm"),
        ),
        Language("bash", ("bash", "sh", "shell"), "program.sh", ("bash", FILE)),
    )
}
"""Python has no command: it runs in a warm interpreter."""


def language_of(spec: str | Mapping[str, Any], name: str) -> Language:
    """A language by its name, or by a table: file, run, build, fences."""
    if isinstance(spec, str):
        if spec in LANGUAGES:
            return LANGUAGES[spec]
        raise ConfigError(
            f"{name!r}: there is no language {spec!r}; there are {', '.join(LANGUAGES)}, or give a table: "
            '{file = "program.rb", run = "ruby {file}"}'
        )
    unknown = set(spec) - {"file", "run", "build", "fences"}
    if unknown or not {"file", "run"} <= set(spec):
        raise ConfigError(
            f"{name!r}: a language's table has file and run, and may have build and fences; "
            f"this one has {', '.join(map(str, spec)) or 'nothing'}"
        )
    file = str(spec["file"])
    if "/" in file or not file:
        raise ConfigError(
            f"{name!r}: file is the name of the source file, without folders, not {file!r}"
        )
    build = _words(spec["build"]) if spec.get("build") else None
    return Language("other", tuple(spec.get("fences", ())), file, _words(spec["run"]), build)


def _words(command: Any) -> tuple[str, ...]:
    return tuple(shlex.split(command)) if isinstance(command, str) else tuple(map(str, command))


@dataclass(kw_only=True, eq=False)
class Programs(TestsReward):
    """The share of the task's cases whose output is right, or 1 only if all are.

    Cases are the task's metadata under `key`, or its target: a list of tables with `stdin` and `stdout`,
    or {inputs, outputs}. `language` is python, c, c++, bash, or a table with the commands of another one;
    a task may name its own in its metadata. Each run may use `seconds` of CPU time, all of them together
    `total_seconds`. A program that ends the session it runs in fails all cases after it.
    """

    language: str | Mapping[str, Any] = "python"
    name: str = "programs"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._language = language_of(self.language, self.name)

    async def _score_answer(self, task: Task, answer: str, sandboxes: SandboxFactory) -> Parts:
        named = task.metadata.get("language")
        language = self._language if named is None else language_of(named, self.name)
        cases = self._cases(task)
        code = code_of(answer, language.fences)
        results = await self._run_cases(await self._sandbox(sandboxes), code, cases, language, task)
        parts = self.credited(results or (), len(cases))
        return {**parts, f"{self.name}_built": float(results is not None)}

    def _cases(self, task: Task) -> list[StdinCase]:
        raw = task.metadata.get(self.key, task.target)
        try:
            cases = parse_tests(raw) if raw is not None else []
        except ValueError as error:
            raise BrokenTask(str(error)) from error
        stdin = (
            [case for case in cases if isinstance(case, StdinCase)] if isinstance(cases, list) else []
        )
        if not stdin:
            raise BrokenTask("the task has no cases with 'stdin' and 'stdout'")
        return stdin

    async def _run_cases(
        self, sandbox: Sandbox, code: str, cases: list[StdinCase], language: Language, task: Task
    ) -> list[TestResult] | None:
        """The result of each case; None when the program cannot be built."""
        budget = TimeBudget(self.total_seconds)
        if not language.run:
            return await self.run_python(sandbox, code, cases, budget)
        build_seconds = max(self.limits.cpu_seconds, _BUILD_SECONDS)
        limits = self.limits.model_copy(update={"cpu_seconds": build_seconds})
        opening = sandbox.session(files={language.file: code}, limits=limits)
        async with await budget.waiting(opening) as session:
            for command in (language.build, language.run):
                await _require(session, command)
            if not await self._is_built(session, language, task):
                return None
            budget = TimeBudget(self.total_seconds)
            return await self.run_stdin_cases(
                cases, lambda case: self._run(session, language, case.stdin), budget
            )

    async def _is_built(self, session: Session, language: Language, task: Task) -> bool:
        if language.build is None:
            return True
        built = await session.run(language.command(language.build), wall_seconds=_BUILD_SECONDS)
        if not built.ok:
            _log.info("task %s: the program does not compile: %s", task.id, built.text()[:2_000])
        return built.ok

    async def _run(self, session: Session, language: Language, stdin: str) -> Execution:
        """One run. The session's CPU limit is the compiler's, so the program gets its own."""
        limited = ["bash", "-c", f'ulimit -t {math.ceil(self.limits.cpu_seconds)}; exec "$@"', "program"]
        command = [*limited, *language.command(language.run)]
        done = await session.run(command, stdin=stdin, wall_seconds=self.limits.wall_seconds)
        # A program that ended its session did not exit normally.
        return replace(done, outcome=Outcome.KILLED) if done.lost else done


async def _require(session: Session, command: Sequence[str] | None) -> None:
    """`InfraError` when a command's program is missing in the sandbox: not the answer's fault."""
    program = command[0] if command else PROGRAM
    if program in (FILE, PROGRAM) or program.startswith("."):
        return
    found = await session.run(["bash", "-c", 'command -v -- "$1"', "look", program])
    if not found.ok:
        raise InfraError(
            Boundary.REWARD,
            f"there is no {program!r} in the sandbox; install it on this machine",
            retriable=False,
        )
