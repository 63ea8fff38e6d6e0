"""Tests as a list of Python sources: each runs what it defines, and what checks nothing counts for nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from ludus.core import InfraError, Task
from ludus.rewards import synthetic_episode
from ludus.rewards.code_tests import UnitTests
from ludus.sandbox import SandboxConfig, shared_sandbox

CONFIG = SandboxConfig(workers=1)
on_sandbox = pytest.mark.asyncio(loop_scope="module")
RIGHT, WRONG, BROKEN = "def add(a, b): return a + b", "def add(a, b): return 0", "def add(a, b"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3"
CLASS = (
    "import unittest\nclass T(unittest.TestCase):\n"
    "    def test_a(self): self.assertEqual(add(1, 2), 3)\n"
    "    def test_b(self): self.assertEqual(add(2, 2), 4)"
)
HELPER = (
    "def both(a, b):\n    same(add(a, b), 3)\n    same(add(b, a), 3)\ndef same(a, b):\n    assert a == b"
)


@pytest_asyncio.fixture(autouse=True, loop_scope="module", scope="module")
async def _no_sandbox_is_left() -> AsyncIterator[None]:
    yield
    await shared_sandbox(CONFIG).close()


async def counts(code: str, tests: Any, **metadata: Any) -> tuple[float, float]:
    task = Task.of("Write add(a, b).", tests=tests, **metadata)
    reward = UnitTests(seconds=0.5, sandbox=CONFIG)
    found = await reward.score(synthetic_episode(task, f"```python\n{code}\n```"), task, {})
    return found["unit_tests_passed"], found["unit_tests_total"]


@pytest.mark.parametrize(
    ("tests", "total"),
    [
        (["def test_a():\n    assert add(1, 2) == 3"], 1),
        (["def test_a(): assert add(1, 2) == 3", "async def test_b(): assert add(2, 2) == 4"], 2),
        (["def test_a(): assert add(1, 2) == 3", "def test_a(): assert add(2, 2) == 4"], 2),
        ([CLASS, "assert add(3, 4) == 7"], 3),
        (["class TestIt:\n    def test_a(self): assert add(1, 2) == 3"], 1),
        ([CHECK], 1),
        ([CHECK, "check(add)"], 1),
        (["import math", "x = 3", "assert add(1, 2) == x", "assert add(2, 2) == math.sqrt(16)"], 2),
        ([HELPER, "same(add(1, 2), 3)", "both(1, 2)"], 2),
        (["class Checks:\n    def of(self, a, b): assert add(a, b) == 3", "Checks().of(1, 2)"], 1),
        (["x = add(1, 2)\nassert x == 3\nassert add(x, 1) == 4"], 1),
        (["from solution import add", "import unittest", "\n".join(CLASS.splitlines()[1:])], 2),
    ],
)
@on_sandbox
async def test_each_source_runs_what_it_defines(tests: list[str], total: int) -> None:
    for code, passed in ((RIGHT, total), (WRONG, 0), (BROKEN, 0)):
        assert await counts(code, tests, entry_point="add") == (passed, total)


@on_sandbox
async def test_what_one_source_defines_is_not_run_again_by_the_next() -> None:
    tests = [
        "def test_a(): assert add(1, 2) == 4",
        "def test_b(): assert add(1, 2) == 3",
        "assert add(0, 0) == 0",
    ]
    assert await counts(RIGHT, tests) == (2, 3)


@pytest.mark.parametrize("tests", [["import math", "x = 3"], ["add(1, 2) == 3"], ["", "pass"], "x = 3"])
@pytest.mark.parametrize("code", [WRONG, BROKEN])
@on_sandbox
async def test_tests_that_check_nothing_are_broken_whatever_the_answer(tests: Any, code: str) -> None:
    with pytest.raises(InfraError, match="broken: there are none"):
        await counts(code, tests)


@pytest.mark.parametrize(
    "tests",
    [
        ["import no_such_module", "assert add(1, 2) == 3"],
        ["import no_such_module\nassert add(1, 2) == 3"],
    ],
)
@on_sandbox
async def test_a_module_that_is_missing_is_not_the_answers_fault(tests: list[str]) -> None:
    with pytest.raises(InfraError, match="no_such_module"):
        await counts(RIGHT, tests)


@pytest.mark.parametrize("tests", ["x = add(1, 2)\nassert x == 3", ["x = add(1, 2)", "assert x == 3"]])
@on_sandbox
async def test_an_answer_cannot_pretend_that_a_module_is_missing(tests: Any) -> None:
    code = "def add(a, b): raise ModuleNotFoundError('no module named tests', name='tests')"
    assert await counts(code, tests) == (0, 1)


@on_sandbox
async def test_setup_that_the_answer_breaks_fails_what_follows() -> None:
    tests = ["assert add(1, 2) == 3", "from solution import Stack", "assert add(2, 2) == 4"]
    assert await counts(RIGHT, tests) == (1, 2)
    assert await counts(RIGHT + "\nclass Stack: pass", tests) == (2, 2)


@pytest.mark.parametrize("tests", [CHECK, [CHECK], ["import math", CHECK]])
@on_sandbox
async def test_a_check_that_nobody_calls_needs_an_entry_point(tests: Any) -> None:
    with pytest.raises(InfraError, match="entry_point"):
        await counts(RIGHT, tests)


@on_sandbox
async def test_tests_that_are_defined_where_nothing_finds_them_are_not_passed() -> None:
    with pytest.raises(InfraError, match="broken"):
        await counts(WRONG, "if True:\n    def test_a():\n        assert add(1, 2) == 3")


@on_sandbox
async def test_our_own_refusal_to_carry_a_value_is_no_error_of_the_answers() -> None:
    tests = "import pytest\ndef test_a():\n    with pytest.raises(ValueError):\n        add(1, 2)"
    cyclic = "def add(a, b):\n    x = []\n    x.append(x)\n    return x"
    assert await counts(cyclic, tests) == (0, 1)
    assert await counts("def add(a, b): raise ValueError('no')", tests) == (1, 1)
