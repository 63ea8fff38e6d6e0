"""Tests that pass although nothing is solved: what the proxies refuse, and what is found and told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.core import Task
from ludus.rewards import synthetic_episode
from ludus.rewards.code_tests import UnitTests
from ludus.rewards.code_tests.weak_tests import AGREES, ECHO, EMPTY, WeakTest, find_weak_tests
from ludus.sandbox import SandboxConfig, shared_sandbox

CONFIG = SandboxConfig(workers=1)
on_sandbox = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(autouse=True, loop_scope="module", scope="module")
async def _no_sandbox_is_left() -> AsyncIterator[None]:
    yield
    await shared_sandbox(CONFIG).close()


def reward(**options: Any) -> UnitTests:
    return UnitTests(**{"seconds": 2.0, "sandbox": CONFIG, **options})


async def share(code: str, tests: Any) -> float:
    task = Task.of("Write it.", tests=tests)
    return (await reward().score(synthetic_episode(task, code), task, {}))["unit_tests"]


CLOSE = [
    "assert np.allclose(f(1), 3.0)",
    "assert np.allclose(3.0, f(1))",
    "import numpy as np\nassert np.allclose(a=f(1), b=[3.0])",
    "from numpy import allclose\nassert allclose(f(1), 3.0, rtol=1e-3)",
    "def test_a():\n    import numpy\n    assert numpy.isclose(f(1), 3.0).all()",
    "assert np.array_equiv(f(1), 3.0)",
    "import numpy as np\ndef test_a(): np.testing.assert_allclose(f(1), 3.0)",
    "from numpy.testing import assert_array_equal\ndef test_a(): assert_array_equal(f(1), 3.0)",
    "import numpy as np\ndef test_a(): np.testing.assert_almost_equal(f(1), 3.0)",
]
EMPTIES = {
    "list": "def f(x): return []",
    "array": "import numpy\ndef f(x): return numpy.array([])",
    "object": "class Empty:\n    def __len__(self): return 0\n    def __getitem__(self, i): raise IndexError\n"
    "def f(x): return Empty()",
    "fickle": "class Fickle:\n    n = 1\n    def __len__(self):\n        Fickle.n -= 1\n"
    "        return max(0, Fickle.n)\n    def __getitem__(self, i): return 5.0\ndef f(x): return Fickle()",
}


@on_sandbox
@pytest.mark.parametrize("test", CLOSE)
async def test_nothing_is_close_to_a_number_by_being_empty(test: str) -> None:
    assert await share("def f(x): return 3.0 * x", [test]) == 1.0
    for name, code in EMPTIES.items():
        assert await share(code, [test]) == 0.0, name


@on_sandbox
async def test_empty_equals_empty_and_arrays_are_compared_as_before() -> None:
    sound = "def f(x): return [float(i) for i in x]\ndef g(): return [[1.0], [2.0, 3.0]]"
    tests = [
        "assert np.allclose(f([]), [])",
        "assert np.allclose(f([1, 2]), [1.0, 2.0])",
        "assert np.allclose(f([1, 1]), 1.0)",
        "assert not np.allclose(f([1, 2]), [1.0, 2.5])",
        "import numpy as np\nnp.testing.assert_array_equal(np.zeros((0, 3)), np.ones((0, 3)))",
        "import numpy as np\nassert np.isclose(f([1.0]), [1.0 + 1e-12], rtol=1e-9, atol=0).tolist() == [True]",
        "import numpy as np\ndef test_a():\n    with pytest.raises(ValueError):\n        np.allclose(g(), 1.0)",
    ]
    assert await share(sound, tests) == 1.0


def found_with(found: list[WeakTest], task: str, cheat: str) -> tuple[str, ...]:
    return next((one.tests for one in found if (one.task, one.cheat) == (task, cheat)), ())


@on_sandbox
async def test_tests_that_pass_unsolved_are_found_by_task_and_test() -> None:
    tasks = [
        Task.of("Add.", id="sound", tests=["assert add(1, 2) == 3", "assert add(2, 2) == 4"]),
        Task.of(
            "Vectors.",
            id="indirect",
            tests=[
                "assert Vector(1, 2) + Vector(3, 4) < Vector(9, 9)",
                "assert Vector(1, 2).length() == 5 ** 0.5",
                "assert Vector(0, 0).is_zero()",
            ],
        ),
        Task.of(
            "Sort.", id="echo", tests="assert order([1, 2]) == [1, 2]\nassert order([2, 1]) == [1, 2]"
        ),
        Task.of("Empty.", id="empty", tests=["assert all(x > 3 for x in large([1, 5]))"]),
        Task.of("Is it?", id="constant", tests=["assert even(2)", "assert even(4) is True"]),
        Task.of("Both.", id="both", tests=["assert odd(1) is True", "assert odd(2) is False"]),
        Task.of(
            "A class.",
            id="methods",
            tests="from solution import Stack\n\ndef test_new():\n    assert Stack().pop() is None\n",
        ),
        Task.of("Call.", id="calls", function="f", tests=[{"args": [3], "expected": 3}]),
        Task.of("Program.", id="stdin", tests=[{"stdin": "5\n", "stdout": "5\n"}]),
        Task.of(
            "Check.",
            id="check",
            entry_point="g",
            tests="def check(candidate):\n    assert candidate(1)\n",
        ),
    ]
    found = await find_weak_tests(reward(), tasks)
    assert {one.task for one in found} == {one.id for one in tasks} - {"sound", "both"}
    assert found_with(found, "indirect", AGREES) == (
        "assert Vector(1, 2) + Vector(3, 4) < Vector(9, 9)",
        "assert Vector(0, 0).is_zero()",
    )
    assert found_with(found, "echo", ECHO) == ("assert order([1, 2]) == [1, 2]",)
    assert found_with(found, "empty", EMPTY) == ("assert all(x > 3 for x in large([1, 5]))",)
    assert len(found_with(found, "constant", "True")) == 2
    assert found_with(found, "methods", "methods that return None") == ("test_new",)
    assert found_with(found, "calls", ECHO) == ("case 0",)
    assert found_with(found, "stdin", "a program that repeats its input") == ("case 0",)
    assert found_with(found, "check", AGREES) and found_with(found, "check", "True")
    serious = {(one.task, one.cheat) for one in found if one.is_serious}
    assert (
        ("indirect", AGREES) in serious and ("calls", ECHO) in serious and ("echo", ECHO) not in serious
    )
    [whole] = [str(one) for one in found if (one.task, one.cheat) == ("calls", ECHO)]
    assert whole == "task calls: all 1 tests pass with its first argument: case 0"


RECIPE = """
rewards = ["unit_tests"]

[model]
scratch = {}

[tasks]
train = "tasks.jsonl"

[rl]
steps = 1
"""


@pytest.mark.parametrize("given", ["recipe", "tasks"])
def test_the_command_names_task_and_test(tmp_path: Path, monkeypatch: Any, given: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(
        '{"prompt": "Sort.", "id": "sorting", "tests": ["assert order([1, 2]) == [1, 2]"]}\n'
        '{"prompt": "Add.", "id": "adding", "tests": ["assert add(1, 2) == 3"]}\n'
    )
    Path("recipe.toml").write_text(RECIPE)
    command = ["recipe.toml"] if given == "recipe" else ["unit_tests", "--tasks", "tasks.jsonl"]
    done = CliRunner().invoke(app, ["check", "reward", *command])
    told = " ".join(done.output.split())
    assert done.exit_code == 0, told
    assert (
        "task sorting: all 1 tests pass with its first argument: assert order([1, 2]) == [1, 2]" in told
    )
    assert "adding" not in told and "2 tasks" in told


def test_the_command_needs_something_to_check(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", "reward", "exact_match"])
    assert done.exit_code != 0 and "--labels" in f"{done.output} {done.exception}"
