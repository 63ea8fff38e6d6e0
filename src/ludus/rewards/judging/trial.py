"""One solution on trial: its process, the judge's process, and the host that carries messages between.

Who waits for whom. The host asks one process at a time and waits for its answer: the judge runs until it
needs the solution, the solution runs until it has answered. Each answer is bounded by the sandbox's
limits (time, memory, bytes of output), and all of a trial by `total_seconds`. The solution's process is
replaced when it ends, hangs or stops answering; the test that caused it has failed, and the next one
starts afresh. The host hands texts on and evaluates nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ludus.rewards.judging.comparing import same_value
from ludus.rewards.judging.inside.names import BrokenTests, free_names
from ludus.rewards.judging.inside.plain import Decoder, Encoder, no_handles, read, refuse, write
from ludus.rewards.judging.inside.seen import look
from ludus.rewards.judging.place import BrokenTask, Clock
from ludus.rewards.judging.specs import CallCase, SourceTests
from ludus.sandbox import Execution, Limits, Outcome, Sandbox, Session
from ludus.sandbox.bundling import bundle, call

_INSIDE = "ludus.rewards.judging.inside"
_PLAIN, _JUDGED, _JUDGE = f"{_INSIDE}.plain", f"{_INSIDE}.judged", f"{_INSIDE}.judge"
_JUDGE_NEEDS = ("names", "proxies", "seen", "cases", "stand_in")
_ANSWER, _EVENT = "\x1eludus-answer:", "\x1eludus-event:"
_MOST_ANSWER = 1_000_000
"""Bytes of what the solution may answer at once; the judge may ask with a few of such answers."""
_MOST_CODE = 4_000_000
_STOPPED = frozenset(
    {Outcome.TIMEOUT, Outcome.CPU, Outcome.MEMORY, Outcome.OUTPUT, Outcome.PROCESSES, Outcome.KILLED}
)
_JUDGE_LIMITS = Limits(wall_seconds=60, cpu_seconds=30, output_bytes=_MOST_CODE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one test."""

    name: str
    passed: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the solution may take: CPU seconds and memory for each call, and seconds for all of it."""

    seconds: float = 10.0
    memory_mb: int = 512
    total_seconds: float = 60.0

    @property
    def limits(self) -> Limits:
        """CPU time is what counts; the wall clock, which a busy machine slows down, is only a backstop."""
        return Limits(
            cpu_seconds=self.seconds,
            wall_seconds=3 * self.seconds + 2,
            memory_mb=self.memory_mb,
            output_bytes=_MOST_ANSWER,
        )


class CannotLoad(Exception):
    """The solution does not even load: the model's fault, for every test."""


class Solution:
    """The judged program in its process. `generation` counts the processes it has been loaded in."""

    def __init__(self, sandbox: Sandbox, source: str, module: str, bounds: Bounds, clock: Clock) -> None:
        self._sandbox, self._source, self._bounds = sandbox, source, bounds
        self.module = module
        self._session: Session | None = None
        self.clock = clock
        self._is_hopeless = False
        self.generation = -1
        self.names: list[str] = []

    @property
    def expired(self) -> bool:
        """Whether all the time for this solution is used up."""
        return self.clock.expired

    async def load(self) -> None:
        """Start a process and load the solution in it."""
        await self.close()
        opening = self._sandbox.session(limits=self._bounds.limits)
        self._session = await self.clock.waiting(opening)
        await _prepared(self._session, _PLAIN, _JUDGED)
        self.generation += 1
        answer = await self._send(call(_JUDGED, "load", [self._source, self.module]))
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
            return write(await self._send(call(_JUDGED, "serve", [request])))
        except ValueError:
            return json.dumps({"stopped": "its answer is no plain data"})

    async def _send(self, code: str) -> dict[str, Any]:
        assert self._session is not None
        if len(code.encode("utf-8", "replace")) > _MOST_CODE:
            return {"stopped": "what it was to be given is too large"}
        execution = await self._session.python(code)
        answer = _message(execution, _ANSWER)
        if execution.outcome is not Outcome.OK or execution.lost or answer is None:
            await self.close()
            why = "no answer" if execution.ok else str(execution.outcome)
            return {"stopped": why}
        return answer

    async def ready(self) -> None:
        """Load the solution again if its process has gone; one that no longer loads is left alone."""
        if self._session is None and not self.expired and not self._is_hopeless:
            try:
                await self.load()
            except CannotLoad:
                self._is_hopeless = True

    async def close(self) -> None:
        """End the solution's process."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


@asynccontextmanager
async def on_trial(
    sandbox: Sandbox, source: str, module: str, bounds: Bounds, clock: Clock
) -> AsyncIterator[Solution]:
    """The solution, loaded; `CannotLoad` when it does not load."""
    solution = Solution(sandbox, source, module, bounds, clock)
    try:
        await solution.load()
        yield solution
    finally:
        await solution.close()


async def run_source_tests(sandbox: Sandbox, solution: Solution, tests: SourceTests) -> list[Verdict]:
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
    code = call(_JUDGE, "begin", [json.dumps(plan)])
    if len(code) > _MOST_CODE:
        raise BrokenTask(f"the tests are too large: {len(code):,} bytes, of {_MOST_CODE:,}")
    async with await solution.clock.waiting(sandbox.session(limits=_JUDGE_LIMITS)) as judge:
        await _prepared(judge, _PLAIN, *(f"{_INSIDE}.{name}" for name in _JUDGE_NEEDS), _JUDGE)
        return await _heard(judge, solution, code)


def count_tests(tests: SourceTests) -> int:
    """How many there are, as far as the source says. `BrokenTask` when the tests are broken."""
    try:
        return sum(one.count for one in look(tests.sources, tests.entry, tests.one_each))
    except BrokenTests as error:
        raise BrokenTask(f"the tests are broken: {error}") from error


async def _heard(judge: Session, solution: Solution, code: str) -> list[Verdict]:
    """Carry messages until the judge is done."""
    verdicts: list[Verdict] = []
    expected = 1
    while True:
        execution = await judge.python(code)
        event = _message(execution, _EVENT)
        if event is None:
            if execution.outcome not in _STOPPED and not execution.truncated:
                raise RuntimeError(f"the judge failed: {execution.text()[-500:]}")
            # What the solution returned makes a comparison that never ends, takes all memory, or is handed
            # back to the solution several times over.
            return _with_missed(verdicts, expected, f"the judge was stopped: {execution.outcome}")
        reply = ""
        if "broken" in event:
            raise BrokenTask(f"the tests are broken: {event['broken']}")
        if "failed" in event:
            raise RuntimeError(f"the judge failed: {event['failed']}")
        if "ask" in event:
            reply = await solution.ask(str(event["ask"]))
        elif "test" in event:
            verdicts.append(Verdict(str(event["test"]), event["passed"] is True, str(event["problem"])))
            await solution.ready()
        elif "expected" in event:
            expected = int(event["expected"])
        elif event.get("problem"):
            return _with_missed(verdicts, expected, str(event["problem"]))
        else:
            if not verdicts:
                raise RuntimeError("the tests ended, and none of them has run")
            return verdicts
        code = call(_JUDGE, "step", [reply, str(solution.generation)])
        if (
            len(code) > _MOST_CODE
        ):  # JSON leaves some characters as they are which a literal writes as four
            reply = json.dumps({"stopped": "its answer is too large"})
            code = call(_JUDGE, "step", [reply, str(solution.generation)])


def _with_missed(verdicts: list[Verdict], expected: int, problem: str) -> list[Verdict]:
    """The verdicts, and a failure for each test that was not reached: one at least."""
    missed = max(1, expected - len(verdicts))
    return [*verdicts, *[Verdict("not reached", False, problem)] * missed]


async def run_call_cases(solution: Solution, cases: list[CallCase], tolerance: float) -> list[Verdict]:
    """Call the solution's functions, and compare what they return here."""
    verdicts: list[Verdict] = []
    for number, case in enumerate(cases):
        problem = await _call_problem(solution, case, tolerance)
        verdicts.append(Verdict(f"case {number}", problem is None, problem or ""))
        await solution.ready()
    return verdicts


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
        if same_value(found, case.expected, tolerance)
        else f"{_shown(found, 100)} is not {_shown(case.expected, 100)}"
    )


def _shown(value: Any, most: int) -> str:
    """The beginning of a value's text, if it has one: not every number does, nor what is nested deeply."""
    try:
        return repr(value)[:most]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too large to be shown"


def _handle(answer: dict[str, Any], tag: str = "h") -> int | None:
    value = answer.get("value")
    number = value.get(tag) if isinstance(value, dict) else None
    return number if type(number) is int else None


async def _prepared(session: Session, *modules: str) -> None:
    ready = await session.python(bundle(*modules))
    if not ready.ok:
        raise RuntimeError(f"the judging code did not start: {ready.text()[-500:]}")


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
