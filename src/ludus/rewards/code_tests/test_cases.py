"""Test cases: the forms in which a task gives its tests, and how results and outputs are compared.

    "def test_a(): ..."                              source, see `guest.test_discovery`
    ["assert f(1) == 2", "def test_b(): ..."]        sources, each with tests or to prepare those after it
    [{"stdin": "1 2", "stdout": "3"}]                programs that read and write ("input"/"output" as well)
    [{"args": [1, 2], "kwargs": {}, "expected": 3}]  calls of `function`
    {"function": "f", "cases": [...]}                calls of one function
    {"inputs": [...], "outputs": [...], "fn_name": "f"}    as APPS has it; without fn_name for stdin
    {"source": "...", "entry": "f"}                  source that is given the function, as HumanEval has it

All of these may also be JSON text. `ValueError` says what cannot be read.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ludus.core.task import Task
from ludus.remote.threads import run_sync
from ludus.rewards.code_tests.fault_attribution import SandboxedReward, TimeBudget
from ludus.rewards.scores import EXECUTION, Parts
from ludus.sandbox import Execution, Limits, Outcome, Sandbox

MOST_CASES = 1_000


@dataclass(frozen=True, slots=True)
class StdinCase:
    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CallCase:
    function: str
    args: tuple[Any, ...]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceTests:
    """Tests that are Python. With `one_each`, the statements of a source are one test together."""

    sources: tuple[str, ...]
    entry: str | None = None
    one_each: bool = False


Tests = list[StdinCase] | list[CallCase] | SourceTests


@dataclass(frozen=True, slots=True)
class TestResult:
    name: str
    passed: bool
    problem: str = ""
    seconds: float = 0.0
    """How long the solution ran for it."""


def tests_of(task: Task, key: str, function: str | None = None) -> Tests:
    """The tests that a task holds in its metadata under `key`, or as its target."""
    raw = task.metadata.get(key, task.target)
    entry = function or _text_or_none(task.metadata.get("entry_point", task.metadata.get("function")))
    if raw is None:
        raise ValueError(f"the task has no tests: neither metadata {key!r} nor a target")
    return parse_tests(raw, entry)


def parse_tests(raw: Any, function: str | None = None) -> Tests:
    """Tests in one of the forms above."""
    raw = _from_json(raw)
    if isinstance(raw, str):
        return SourceTests((raw,), function)
    if isinstance(raw, Mapping):
        return _from_table(raw, function)
    if not isinstance(raw, Sequence) or not raw:
        raise ValueError(f"tests are text, a list or a table, and not empty: {raw!r:.80}")
    if len(raw) > MOST_CASES:
        raise ValueError(f"there are {len(raw)} tests; at most {MOST_CASES}")
    if all(isinstance(one, str) for one in raw):
        return SourceTests(tuple(raw), function, one_each=True)
    if all(isinstance(one, Mapping) and "expected" in one for one in raw):
        return [_call_case(one, function) for one in raw]
    if all(isinstance(one, Mapping) for one in raw):
        return [_stdin_case(one) for one in raw]
    raise ValueError("tests are either all text or all tables")


def _from_json(raw: Any) -> Any:
    if not isinstance(raw, str) or not raw.lstrip().startswith(("{", "[")):
        return raw
    try:
        found = json.loads(raw)
    except ValueError:
        return raw
    return found if isinstance(found, list | dict) and found else raw


def _from_table(raw: Mapping[str, Any], function: str | None) -> Tests:
    function = _text_or_none(raw.get("function", raw.get("fn_name"))) or function
    if "source" in raw:
        return SourceTests((str(raw["source"]),), _text_or_none(raw.get("entry")) or function)
    if "cases" in raw:
        return parse_tests(raw["cases"], function)
    if "inputs" in raw and "outputs" in raw:
        inputs, outputs = list(raw["inputs"]), list(raw["outputs"])
        if len(inputs) != len(outputs) or not inputs:
            raise ValueError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
        if function is None:
            return [StdinCase(_joined(i), _joined(o)) for i, o in zip(inputs, outputs, strict=True)]
        return [CallCase(function, tuple(i), o) for i, o in zip(inputs, outputs, strict=True)]
    known = "'source', 'cases', or 'inputs' and 'outputs'"
    raise ValueError(
        f"a table of tests has {known}; this one has {', '.join(map(str, raw)) or 'nothing'}"
    )


def _call_case(raw: Mapping[str, Any], function: str | None) -> CallCase:
    name = _text_or_none(raw.get("function")) or function
    if name is None:
        raise ValueError("a case with arguments needs the name of the function")
    args, kwargs = raw.get("args", ()), raw.get("kwargs", {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise ValueError("a case's args are a list, and its kwargs a table")
    return CallCase(name, tuple(args), raw["expected"], dict(kwargs))


def _stdin_case(raw: Mapping[str, Any]) -> StdinCase:
    stdin, stdout = raw.get("stdin", raw.get("input", "")), raw.get("stdout", raw.get("output"))
    if stdout is None:
        raise ValueError("a case has 'stdin' and 'stdout', or 'args' and 'expected'")
    return StdinCase(_joined(stdin), _joined(stdout))


def _joined(value: Any) -> str:
    """Text; some task sets give lines as a list."""
    if isinstance(value, list | tuple):
        return "\n".join(str(line) for line in value)
    return str(value)


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


# Comparing results with expected ones: pure functions over plain data, run outside the solution's process.

CompareMode = Literal["exact", "tokens", "lines"]
_WHOLE = re.compile(r"[+-]?[0-9]+")


def equal_values(found: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    """Equality of plain data as tests mean it.

    Numbers are equal within `tolerance` (relative, or absolute near 0) as soon as one of them is a float;
    a list and a tuple with equal items are equal, because task files cannot say tuple; True is not 1.
    """
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float | complex) and isinstance(expected, int | float | complex):
        return _same_number(found, expected, tolerance)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(
            equal_values(a, b, tolerance) for a, b in zip(found, expected, strict=True)
        )
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            equal_values(found[key], expected[key], tolerance) for key in expected
        )
    if isinstance(found, set | frozenset) and isinstance(expected, set | frozenset):
        return found == expected
    return type(found) is type(expected) and bool(found == expected)


def _same_number(one: float | complex, other: float | complex, tolerance: float) -> bool:
    if one == other:
        return True
    if type(one) is int and type(other) is int:
        return False
    try:
        distance, size = abs(one - other), max(abs(one), abs(other))
    except OverflowError:
        return False
    if one != one or other != other:
        return one != one and other != other
    return math.isfinite(size) and distance <= tolerance * max(1.0, size)


def equal_outputs(
    found: str, expected: str, manner: CompareMode = "tokens", tolerance: float | None = None
) -> bool:
    """Whether a program wrote what it should.

    "exact" compares every character but line ends at the end, "lines" line by line without white space at
    the ends of lines and of the text, "tokens" the words alone. With `tolerance`, words that are both
    numbers are equal within it, unless both are whole: these are the same number, or not.
    """
    if manner == "exact":
        return _unix(found).rstrip("\n") == _unix(expected).rstrip("\n")
    if manner == "tokens":
        return _same_words(found.split(), expected.split(), tolerance)
    ours, theirs = (_unix(text).rstrip().split("\n") for text in (found, expected))
    return len(ours) == len(theirs) and all(
        _same_words(a.rstrip().split(" "), b.rstrip().split(" "), tolerance)
        for a, b in zip(ours, theirs, strict=True)
    )


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


def _same_words(found: list[str], expected: list[str], tolerance: float | None) -> bool:
    return len(found) == len(expected) and all(
        a == b or (tolerance is not None and _close_words(a, b, tolerance))
        for a, b in zip(found, expected, strict=True)
    )


def _close_words(found: str, expected: str, tolerance: float) -> bool:
    if len(found) > 400 or len(expected) > 400:
        return False
    if _WHOLE.fullmatch(found) and _WHOLE.fullmatch(expected):
        return int(found) == int(expected)
    try:
        one, other = float(found), float(expected)
    except ValueError:
        return False
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


# The code in an answer: the last fenced block, or all of it.

_FENCE = re.compile(r"[ \t]{0,3}+(`{3,}+|~{3,}+)[ \t]*+([A-Za-z0-9_+#.-]*+)[^\n`]*+")
"""Possessive: no answer can make it backtrack and block the event loop."""
_MOST_CHARS = 200_000


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each fenced block, in order. One that is never closed lasts to the end."""
    blocks: list[tuple[str, str]] = []
    mark, language, lines = "", "", list[str]()
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip("\r"))
        if not mark:
            if fence:
                mark, language, lines = fence[1], fence[2].lower(), []
        elif fence and fence[1].startswith(mark) and not fence[2]:
            blocks.append((language, "\n".join(lines)))
            mark = ""
        else:
            lines.append(line)
    if mark:
        blocks.append((language, "\n".join(lines)))
    return blocks


def code_of(answer: str, languages: Collection[str]) -> str:
    """The last block in one of the languages, or without one, or any; the whole answer if there is none."""
    blocks = fenced_blocks(answer[-_MOST_CHARS:])
    for wanted in (languages, ("",)):
        fitting = [code for language, code in blocks if language in wanted]
        if fitting:
            return fitting[-1]
    return blocks[-1][1] if blocks else answer[-_MOST_CHARS:]


# The rewards that run several tests.

MOST_OUTPUT = 1_000_000
"""Bytes that a program may write in one run."""


@dataclass(kw_only=True, eq=False)
class TestsReward(SandboxedReward, ABC):
    """Scores an answer's code by the tests that it passes: their share, or 1 only if it passes all."""

    credit: Literal["share", "all"] = "share"
    key: str = "tests"
    compare: CompareMode = "tokens"
    tolerance: float | None = None
    seconds: float = 10.0
    memory_mb: int = 512
    total_seconds: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # CPU time is what counts: a busy machine slows down the wall clock, a backstop only
        self.limits = Limits(
            cpu_seconds=self.seconds,
            wall_seconds=3 * self.seconds + 2,
            memory_mb=self.memory_mb,
            output_bytes=MOST_OUTPUT,
        )

    def credited(self, results: Sequence[TestResult], total: int) -> Parts:
        """The score under the reward's name, with the counts and the seconds beside it."""
        passed = sum(result.passed for result in results)
        return {
            self.name: passed / total if self.credit == "share" else float(passed == total),
            f"{self.name}_passed": float(passed),
            f"{self.name}_total": float(total),
            EXECUTION: sum(result.seconds for result in results),
        }

    async def run_stdin_cases(
        self,
        cases: Sequence[StdinCase],
        run: Callable[[StdinCase], Awaitable[Execution]],
        budget: TimeBudget,
    ) -> list[TestResult]:
        """The result of each case. None is run when time is up, or when one has failed and all must pass."""
        results: list[TestResult] = []
        for number, case in enumerate(cases):
            name = f"case {number}"
            if budget.expired or (self.credit == "all" and not all(one.passed for one in results)):
                results.append(TestResult(name, False, "not run"))
                continue
            execution = await run(case)
            passed = await self._passes(execution, case)
            problem = "" if passed else execution.text()[-500:]
            results.append(TestResult(name, passed, problem, execution.seconds))
        return results

    async def run_python(
        self, sandbox: Sandbox, code: str, cases: Sequence[StdinCase], budget: TimeBudget
    ) -> list[TestResult]:
        """Run a Python program on each case, in a fresh environment."""

        async def run(case: StdinCase) -> Execution:
            running = sandbox.python(code, stdin=case.stdin, limits=self.limits)
            return await budget.running(running, self.limits.wall_seconds)

        return await self.run_stdin_cases(cases, run, budget)

    async def _passes(self, execution: Execution, case: StdinCase) -> bool:
        """Whether a program exited normally and wrote what was expected; compared in a thread."""
        exited = execution.ok or (execution.outcome is Outcome.EXITED and not execution.exit_code)
        if not exited or execution.truncated:
            return False
        return await run_sync(equal_outputs, execution.stdout, case.stdout, self.compare, self.tolerance)
