"""`unit_tests`: the model's Python against the task's tests, with partial credit.

The solution and the tests never share a process. Tests that are stdin and stdout, or calls and results, are
compared here, outside; tests that are Python run in a sandbox session of their own, where the solution is a
proxy (see `guest.proxies`). All that the solution can do is give answers: it sees no test, no expected
value, no result.

Concurrency: the host sends a request to one process at a time and waits for its reply. The tests' process runs
until it needs the solution, the solution's process until it has replied. Each reply is limited by the sandbox
(time, memory, bytes of output), and all of them by `total_seconds`. The solution's process is replaced when it
ends, hangs or stops replying; the test that caused it has failed, and the next one starts with a fresh process.
The host passes texts on and evaluates nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.rewards.code_tests.fault_attribution import (
    BrokenTask,
    SandboxFactory,
    TimeBudget,
    two_sessions,
)
from ludus.rewards.code_tests.guest.plain_data import Decoder, Encoder, no_handles, read, refuse, write
from ludus.rewards.code_tests.guest.test_discovery import BrokenTests, discover_tests, free_names
from ludus.rewards.code_tests.test_cases import (
    CallCase,
    SourceTests,
    StdinCase,
    TestResult,
    TestsReward,
    code_of,
    equal_values,
    tests_of,
)
from ludus.rewards.scores import Parts
from ludus.sandbox import (
    Execution,
    Limits,
    Outcome,
    Sandbox,
    Session,
    bundle,
    call,
    shared_sandbox,
)

_log = logging.getLogger(__name__)

_LANGUAGES = ("python", "py", "python3")
_GUEST = "ludus.rewards.code_tests.guest"
_PLAIN_DATA, _SOLUTION_MAIN = f"{_GUEST}.plain_data", f"{_GUEST}.solution_main"
_TESTS_MAIN = f"{_GUEST}.tests_main"
_TESTS_MODULES = (
    *(_PLAIN_DATA, f"{_GUEST}.test_discovery", f"{_GUEST}.proxies"),
    _TESTS_MAIN,
)
"""In the order of their imports: a bundle defines them one after another."""
_ANSWER, _EVENT = "\x1eludus-answer:", "\x1eludus-event:"
_MOST_CODE = 4_000_000
"""Bytes of one request; one of the tests may hold a few of the solution's replies (`MOST_OUTPUT`)."""
_STOPPED = frozenset(
    {Outcome.TIMEOUT, Outcome.CPU, Outcome.MEMORY, Outcome.OUTPUT, Outcome.PROCESSES, Outcome.KILLED}
)
_TESTS_PROCESS_LIMITS = Limits(wall_seconds=60, cpu_seconds=30, output_bytes=_MOST_CODE)


class CannotLoad(Exception):
    """The solution does not load: the answer's fault, for every test."""


class Solution:
    """The solution in its process. `generation` counts the processes it has been loaded in."""

    def __init__(
        self, sandbox: Sandbox, source: str, module: str, limits: Limits, budget: TimeBudget
    ) -> None:
        self._sandbox, self._source, self._limits = sandbox, source, limits
        self.module = module
        self._session: Session | None = None
        self.budget = budget
        self._is_hopeless = False
        self.generation = -1
        self.seconds = 0.0
        """How long it has run, in all its processes."""
        self.names: list[str] = []

    @property
    def expired(self) -> bool:
        """Whether all the time for this solution is used up."""
        return self.budget.expired

    async def load(self) -> None:
        """Start a process and load the solution in it."""
        await self.close()
        opening = self._sandbox.session(limits=self._limits)
        self._session = await self.budget.waiting(opening)
        await _define_modules(self._session, _PLAIN_DATA, _SOLUTION_MAIN)
        self.generation += 1
        answer = await self._send(call(_SOLUTION_MAIN, "load", [self._source, self.module]))
        names = answer.get("names")
        if not isinstance(names, list):
            raise CannotLoad(_shown(answer, 500))
        self.names = [name for name in names if isinstance(name, str)]

    async def ask(self, request: str) -> str:
        """The answer to a request, as JSON; {"stopped": why} where the solution gave none."""
        if self.expired:
            return json.dumps({"stopped": "the time for this solution is used up"})
        if self._session is None:
            return json.dumps({"stopped": "its process has ended"})
        try:
            return write(await self._send(call(_SOLUTION_MAIN, "serve", [request])))
        except ValueError:
            return json.dumps({"stopped": "its answer is no plain data"})

    async def _send(self, code: str) -> dict[str, Any]:
        assert self._session is not None
        if len(code.encode("utf-8", "replace")) > _MOST_CODE:
            return {"stopped": "what it was to be given is too large"}
        execution = await self._session.python(code)
        self.seconds += execution.seconds
        answer = _message(execution, _ANSWER)
        if execution.outcome is not Outcome.OK or execution.lost or answer is None:
            await self.close()
            why = "no answer" if execution.ok else str(execution.outcome)
            return {"stopped": why}
        return answer

    async def ready(self) -> None:
        """Load the solution again if its process has ended; one that no longer loads stays unloaded."""
        if self._session is None and not self.expired and not self._is_hopeless:
            try:
                await self.load()
            except CannotLoad:
                self._is_hopeless = True

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


@asynccontextmanager
async def loaded_solution(
    sandbox: Sandbox, source: str, module: str, limits: Limits, budget: TimeBudget
) -> AsyncIterator[Solution]:
    """The solution, loaded; `CannotLoad` when it does not load."""
    solution = Solution(sandbox, source, module, limits, budget)
    try:
        await solution.load()
        yield solution
    finally:
        await solution.close()


async def run_source_tests(sandbox: Sandbox, solution: Solution, tests: SourceTests) -> list[TestResult]:
    """Run tests that are Python, in a process of their own. `BrokenTask` when the tests are broken."""
    try:
        used = set[str]().union(*(free_names(source) for source in tests.sources))
    except BrokenTests as error:
        raise BrokenTask(f"the tests are broken: {error}") from error
    plan = {
        "sources": tests.sources,
        "module": solution.module,
        "names": [name for name in solution.names if name in used or name == tests.entry],
        "entry": tests.entry,
        "one_each": tests.one_each,
    }
    code = call(_TESTS_MAIN, "begin", [json.dumps(plan)])
    if len(code) > _MOST_CODE:
        raise BrokenTask(f"the tests are too large: {len(code):,} bytes, of {_MOST_CODE:,}")
    async with await solution.budget.waiting(
        sandbox.session(limits=_TESTS_PROCESS_LIMITS)
    ) as tests_session:
        await _define_modules(tests_session, *_TESTS_MODULES)
        return await _exchange_messages(tests_session, solution, code)


def count_tests(tests: SourceTests) -> int:
    """How many there are, as far as the source says. `BrokenTask` when the tests are broken."""
    try:
        return sum(one.count for one in discover_tests(tests.sources, tests.entry, tests.one_each))
    except BrokenTests as error:
        raise BrokenTask(f"the tests are broken: {error}") from error


async def _exchange_messages(tests_session: Session, solution: Solution, code: str) -> list[TestResult]:
    """Pass messages between the two processes until all tests have run."""
    results: list[TestResult] = []
    expected, spent = 1, 0.0
    while True:
        execution = await tests_session.python(code)
        event = _message(execution, _EVENT)
        if event is None:
            if execution.outcome not in _STOPPED and not execution.truncated:
                raise RuntimeError(f"the test process failed: {execution.text()[-500:]}")
            # A value of the solution can make a comparison endless, use up the memory, or be sent back to the
            # solution several times over.
            return _with_unreached(
                results, expected, f"the test process was stopped: {execution.outcome}"
            )
        reply = ""
        if "broken" in event:
            raise BrokenTask(f"the tests are broken: {event['broken']}")
        if "failed" in event:
            raise RuntimeError(f"the test process failed: {event['failed']}")
        if "ask" in event:
            reply = await solution.ask(str(event["ask"]))
        elif "test" in event:
            passed, problem = event["passed"] is True, str(event["problem"])
            seconds, spent = solution.seconds - spent, solution.seconds
            results.append(TestResult(str(event["test"]), passed, problem, seconds))
            await solution.ready()
        elif "expected" in event:
            expected = int(event["expected"])
        elif event.get("problem"):
            return _with_unreached(results, expected, str(event["problem"]))
        else:
            if not results:
                raise RuntimeError("the tests ended, and none of them has run")
            return results
        code = call(_TESTS_MAIN, "step", [reply, str(solution.generation)])
        if len(code) > _MOST_CODE:  # a Python literal can be four times as long as its JSON
            reply = json.dumps({"stopped": "its answer is too large"})
            code = call(_TESTS_MAIN, "step", [reply, str(solution.generation)])


def _with_unreached(results: list[TestResult], expected: int, problem: str) -> list[TestResult]:
    """The results, and a failure for each test that was not reached: one at least."""
    missed = max(1, expected - len(results))
    return [*results, *[TestResult("not reached", False, problem)] * missed]


async def run_call_cases(
    solution: Solution, cases: list[CallCase], tolerance: float
) -> list[TestResult]:
    """Call the solution's functions, and compare what they return here."""
    results: list[TestResult] = []
    spent = 0.0
    for number, case in enumerate(cases):
        problem = await _call_problem(solution, case, tolerance)
        seconds, spent = solution.seconds - spent, solution.seconds
        results.append(TestResult(f"case {number}", problem is None, problem or "", seconds))
        await solution.ready()
    return results


async def _call_problem(solution: Solution, case: CallCase, tolerance: float) -> str | None:
    encode = Encoder(refuse).encode
    request = {
        "args": [encode(one) for one in case.args],
        "named": [[key, encode(one)] for key, one in case.kwargs.items()],
    }
    handle: Any = 0
    for part in case.function.split("."):
        answer = read(
            await solution.ask(write({"do": "get", "on": handle, "args": [part.removesuffix("()")]}))
        )
        handle = _handle(answer)
        if handle is not None and part.endswith("()"):
            handle = _handle(read(await solution.ask(write({"do": "call", "on": handle}))))
        if handle is None:
            return f"there is no function {case.function}: {_shown(answer, 200)}"
    answer = read(await solution.ask(write({"do": "call", "on": handle, **request})))
    coroutine = _handle(answer, "w")
    if coroutine is not None:
        answer = read(await solution.ask(write({"do": "await", "on": coroutine})))
    if "value" not in answer:
        return f"no result: {_shown(answer, 200)}"
    try:
        found = Decoder(no_handles).decode(answer["value"])
    except ValueError:
        return "the result is not plain data"
    return (
        None
        if equal_values(found, case.expected, tolerance)
        else f"{_shown(found, 100)} is not {_shown(case.expected, 100)}"
    )


def _shown(value: Any, most: int) -> str:
    """The beginning of a value's text; very long integers and deep nesting have none."""
    try:
        return repr(value)[:most]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too large to be shown"


def _handle(answer: dict[str, Any], tag: str = "h") -> int | None:
    value = answer.get("value")
    number = value.get(tag) if isinstance(value, dict) else None
    return number if type(number) is int else None


async def _define_modules(session: Session, *modules: str) -> None:
    ready = await session.python(bundle(*modules))
    if not ready.ok:
        raise RuntimeError(f"the test process did not start: {ready.text()[-500:]}")


def _message(execution: Execution, mark: str) -> dict[str, Any] | None:
    """The last line that carries a message; None where there is none that can be read."""
    _, found, rest = execution.stdout.rpartition(mark)
    if not found:
        return None
    try:
        message = read(rest.partition("\n")[0])
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


@dataclass(kw_only=True, eq=False)
class UnitTests(TestsReward):
    """The share of the task's tests that the answer's code passes, or 1 only if it passes all.

    Tests are the task's metadata under `key`, or its target; `test_cases` lists their forms. The code is
    the last fenced Python block of the answer, or all of it. A call or a program may use `seconds` of CPU
    time, all tests together `total_seconds`; what takes longer has failed. Waiting longer than
    `total_seconds` for a place in the sandbox is an `InfraError`, not the answer's fault.
    """

    function: str | None = None
    module: str = "solution"
    tolerance: float = 1e-6
    name: str = "unit_tests"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.module.isidentifier():
            raise ConfigError(f"{self.name!r}: module is the name of a module, not {self.module!r}")
        if self.sandbox_config.max_sessions < 2:
            raise ConfigError(
                f"{self.name!r}: the tests and the solution have a session each; set max_sessions of its "
                "sandbox to 2 or more"
            )

    async def _score_answer(self, task: Task, answer: str, sandboxes: SandboxFactory) -> Parts:
        code = code_of(answer, _LANGUAGES)
        results = await self.run_tests(await self._sandbox(sandboxes), code, task)
        for result in results:
            if not result.passed:
                _log.debug("task %s, %s: %s", task.id, result.name, result.problem)
        return self.credited(results, len(results))

    async def results_of(self, code: str, task: Task) -> list[TestResult]:
        """A result for each of the task's tests, in the reward's own sandbox."""
        return await self.run_tests(await self._sandbox(shared_sandbox), code, task)

    async def run_tests(self, sandbox: Sandbox, code: str, task: Task) -> list[TestResult]:
        """A result for each of the task's tests."""
        try:
            tests = tests_of(task, self.key, self.function)
        except ValueError as error:
            raise BrokenTask(str(error)) from error
        budget = TimeBudget(self.total_seconds)
        if isinstance(tests, list) and isinstance(tests[0], StdinCase):
            return await self.run_python(sandbox, code, tests, budget)
        try:
            if not isinstance(tests, SourceTests):
                async with loaded_solution(sandbox, code, self.module, self.limits, budget) as solution:
                    return await run_call_cases(solution, tests, self.tolerance)
            async with (
                two_sessions(sandbox, budget),
                loaded_solution(sandbox, code, self.module, self.limits, budget) as solution,
            ):
                return await run_source_tests(sandbox, solution, tests)
        except CannotLoad as error:
            count = count_tests(tests) if isinstance(tests, SourceTests) else len(tests)
            return [TestResult("load", False, str(error))] * count
