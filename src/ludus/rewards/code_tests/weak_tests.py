"""Tests that pass unsolved: a task's own tests, run against solutions that solve nothing.

Some tests ask the solution for its opinion (`assert a < b` of two of its objects, `assert stack.ok()`), some
are met by any constant or by the input itself. Each such test is credit for nothing, and a policy finds it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.rewards.code_tests.guest.test_discovery import KNOWN_MODULES, BrokenTests, free_names
from ludus.rewards.code_tests.test_cases import SourceTests, StdinCase, TestResult, tests_of
from ludus.rewards.code_tests.unit_tests import UnitTests

_AT_ONCE = 4
_MOST_TEXT = 100

_OPERATORS = (
    "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift neg abs getitem call enter"
)
_PRELUDE = f"""
class _Type(type):
    def __getattr__(self, name): return _agreed(name)

class _Agrees(metaclass=_Type):
    def __init__(self, *args, **named): pass
    def __getattr__(self, name): return _agreed(name)
    def __bool__(self): return True
    def __len__(self): return 1
    def __iter__(self): return iter(range(1000))
    def __exit__(self, *args): return None
    def __setitem__(self, *args): return None
    def __delitem__(self, *args): return None

def _agreed(name):
    if name.startswith("__"): raise AttributeError(name)
    return _Agrees()

for _name in {_OPERATORS!r}.split():
    setattr(_Agrees, f"__{{_name}}__", lambda self, *args, **named: self)
for _name in "eq ne lt le gt ge contains".split():
    setattr(_Agrees, f"__{{_name}}__", lambda self, other: True)
_Agrees.__hash__ = lambda self: 0

def _methods(value):
    class _Fixed:
        def __init__(self, *args, **named): pass
        def __getattr__(self, name):
            if name.startswith("__"): raise AttributeError(name)
            return lambda *args, **named: value
    return _Fixed

def _raises(*args, **named):
    raise ValueError("no")
"""

AGREES, EMPTY, ECHO = "an object that agrees with everything", "an empty list", "its first argument"
_TELLING = (AGREES, EMPTY, ECHO)
"""These tell of each test that they pass; a constant only where it passes all of them."""
_VALUES = {
    "True": "True",
    "False": "False",
    "None": "None",
    "0": "0",
    "an empty text": "''",
    EMPTY: "[]",
}
CHEATS = {
    AGREES: "_Agrees",
    ECHO: "lambda *args, **named: args[0] if args else None",
    **{told: f"lambda *args, **named: {value}" for told, value in _VALUES.items()},
    **{f"methods that return {told}": f"_methods({value})" for told, value in _VALUES.items()},
    "an error": "_raises",
}
"""The object that replaces every name of the solution, for each cheat."""
PROGRAMS = {
    "a program that prints nothing": "",
    "a program that repeats its input": "import sys\nprint(sys.stdin.read(), end='')",
    **{f"a program that prints {word}": f"print({word!r})" for word in ("0", "1", "YES", "NO", "-1")},
}


@dataclass(frozen=True, slots=True)
class WeakTest:
    """Tests of a task that pass although nothing is solved."""

    task: str
    cheat: str
    tests: tuple[str, ...]
    total: int
    """How many tests the task has."""

    @property
    def is_whole(self) -> bool:
        """Whether the task is passed by it."""
        return len(self.tests) == self.total

    @property
    def is_serious(self) -> bool:
        """Whether it is more than an edge case among others: all tests, or one that the solution decides."""
        return self.is_whole or self.cheat == AGREES

    def __str__(self) -> str:
        which = (
            f"all {self.total} tests" if self.is_whole else f"{len(self.tests)} of {self.total} tests"
        )
        return f"task {self.task}: {which} pass with {self.cheat}: {'; '.join(self.tests[:3])}" + (
            "; ..." if len(self.tests) > 3 else ""
        )


async def find_weak_tests(reward: UnitTests, tasks: Iterable[Task]) -> list[WeakTest]:
    """Tests of these tasks that pass unsolved, by task and cheat. Broken tasks are left out."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(task: Task, cheat: str, code: str) -> WeakTest | None:
        async with places:
            results = await reward.results_of(code, task)
        passed = tuple(_text_of(result, task, reward) for result in results if result.passed)
        found = WeakTest(task.id, cheat, passed, len(results))
        return found if passed and (cheat in _TELLING or found.is_whole) else None

    jobs = [one(task, *cheat) for task in tasks for cheat in _cheats(reward, task)]
    return [found for found in await asyncio.gather(*jobs) if found is not None]


def _cheats(reward: UnitTests, task: Task) -> list[tuple[str, str]]:
    """Solutions that solve nothing, by name."""
    try:
        tests = tests_of(task, reward.key, reward.function)
        if isinstance(tests, SourceTests):
            names = set[str]().union(*(free_names(source) for source in tests.sources))
            names -= {*KNOWN_MODULES, *sys.stdlib_module_names}
            names |= {tests.entry} if tests.entry else set()
        elif isinstance(tests[0], StdinCase):
            return list(PROGRAMS.items())
        else:
            names = {case.function.partition(".")[0].removesuffix("()") for case in tests}
    except (ValueError, BrokenTests) as error:
        raise ConfigError(f"task {task.id}: its tests cannot be read: {error}") from error
    return [(told, _solution(names, value)) for told, value in CHEATS.items()]


def _solution(names: Iterable[str], value: str) -> str:
    bound = "".join(f"{name} = _cheat\n" for name in sorted(names) if name.isidentifier())
    return f"{_PRELUDE}\n_cheat = {value}\n{bound}\ndef __getattr__(name): return _cheat\n"


def _text_of(result: TestResult, task: Task, reward: UnitTests) -> str:
    """The source text of a test, where its name identifies it; else its name."""
    tests = tests_of(task, reward.key, reward.function)
    kind, _, number = result.name.partition(",")[0].partition(" ")
    if not isinstance(tests, SourceTests) or not number.isdecimal():
        return result.name
    lines: Sequence[str] = tests.sources[0].splitlines()
    if kind == "test" and int(number) < len(tests.sources):
        if "statements" not in result.name:
            return result.name
        lines = tests.sources[int(number)].splitlines()
        asserting = [line for line in lines if "assert" in line]
        return (asserting or lines or [result.name])[0].strip()[:_MOST_TEXT]
    if kind == "line" and 0 < int(number) <= len(lines):
        return lines[int(number) - 1].strip()[:_MOST_TEXT]
    return result.name
