"""`unit_tests`: the model's Python against the task's tests, with partial credit.

The judged code and the tests never share a process. Tests that are programs' inputs and outputs, or
calls and results, are compared here, outside; tests that are Python run in a sandbox session of their
own, where the solution is a proxy (see `judging.inside.proxies`). What the judged code can do is give
answers: it sees no test, no expected value and no verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.function import checked_name, checked_weight
from ludus.rewards.guard import SelfGuarded
from ludus.rewards.judging.answers import code_of
from ludus.rewards.judging.comparing import Manner
from ludus.rewards.judging.credit import Credit, check_options, credited
from ludus.rewards.judging.outputs import is_right
from ludus.rewards.judging.place import Boxes, BrokenTask, Clock, Place, judged, room_for_two
from ludus.rewards.judging.specs import SourceTests, StdinCase, tests_of
from ludus.rewards.judging.trial import (
    Bounds,
    CannotLoad,
    Verdict,
    count_tests,
    on_trial,
    run_call_cases,
    run_source_tests,
)
from ludus.rewards.values import Parts
from ludus.sandbox import Sandbox, SandboxConfig

_log = logging.getLogger(__name__)

_LANGUAGES = ("python", "py", "python3")


class UnitTests(SelfGuarded):
    """The share of the task's tests that the answer's code passes, or 1 only if it passes all.

    Tests are the task's metadata under `key`, or its target; `judging.specs` lists their forms. The code
    is the last fenced Python block of the answer, or all of it. A call or a program may use `seconds` of
    CPU time, all tests together `total_seconds`; what takes longer has failed. Waiting for room in the
    sandbox is bounded by `total_seconds` too, but is ours: an `InfraError`.
    """

    uses_envs = False

    def __init__(
        self,
        *,
        credit: Credit = "share",
        key: str = "tests",
        function: str | None = None,
        module: str = "solution",
        compare: Manner = "tokens",
        tolerance: float = 1e-6,
        seconds: float = 10.0,
        memory_mb: int = 512,
        total_seconds: float = 60.0,
        sandbox: SandboxConfig | Mapping[str, Any] | None = None,
        name: str = "unit_tests",
        weight: float = 1.0,
    ) -> None:
        check_options(name, credit, compare)
        if not module.isidentifier():
            raise ConfigError(f"{name!r}: module is the name of a module, not {module!r}")
        self.name = checked_name(name)
        self.weight = checked_weight(weight, name)
        self.credit, self.key, self.function, self.module = credit, key, function, module
        self.compare, self.tolerance = compare, tolerance
        self.bounds = Bounds(seconds, memory_mb, total_seconds)
        self._place = Place(sandbox, name)
        if self._place.config.max_sessions < 2:
            raise ConfigError(
                f"{name!r}: the judge and the judged have a session each; set max_sessions of its sandbox to 2 "
                "or more"
            )

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        async def judge(answer: str, boxes: Boxes) -> Parts:
            code = code_of(answer, _LANGUAGES)
            verdicts = await self.judge(await self._place.start(boxes), code, task)
            passed = sum(verdict.passed for verdict in verdicts)
            for verdict in verdicts:
                if not verdict.passed:
                    _log.debug("task %s, %s: %s", task.id, verdict.name, verdict.problem)
            return credited(self.name, self.credit, passed, len(verdicts))

        answer = trajectory.answer or ""
        return await judged(self.name, judge, answer, harmless="")

    async def judge(self, sandbox: Sandbox, code: str, task: Task) -> list[Verdict]:
        """A verdict for each of the task's tests."""
        try:
            tests = tests_of(task, self.key, self.function)
        except ValueError as error:
            raise BrokenTask(str(error)) from error
        if isinstance(tests, list) and isinstance(tests[0], StdinCase):
            return await self._read_and_written(sandbox, code, tests)
        clock = Clock(self.bounds.total_seconds)
        try:
            if not isinstance(tests, SourceTests):
                async with on_trial(sandbox, code, self.module, self.bounds, clock) as solution:
                    return await run_call_cases(solution, tests, self.tolerance)
            async with (
                room_for_two(sandbox, clock),
                on_trial(sandbox, code, self.module, self.bounds, clock) as solution,
            ):
                return await run_source_tests(sandbox, solution, tests)
        except CannotLoad as error:
            count = count_tests(tests) if isinstance(tests, SourceTests) else len(tests)
            return [Verdict("load", False, str(error))] * count

    async def _read_and_written(
        self, sandbox: Sandbox, code: str, cases: Sequence[StdinCase]
    ) -> list[Verdict]:
        clock = Clock(self.bounds.total_seconds)
        verdicts: list[Verdict] = []
        for number, case in enumerate(cases):
            hopeless = self.credit == "all" and not all(verdict.passed for verdict in verdicts)
            if hopeless or clock.expired:
                verdicts.append(Verdict(f"case {number}", False, "not run"))
                continue
            limits = self.bounds.limits
            running = sandbox.python(code, stdin=case.stdin, limits=limits)
            execution = await clock.running(running, limits.wall_seconds)
            passed = await is_right(execution, case, self.compare, self.tolerance)
            problem = "" if passed else execution.text()[-500:]
            verdicts.append(Verdict(f"case {number}", passed, problem))
        return verdicts
