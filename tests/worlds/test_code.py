"""Functions with hidden tests: the problems, what is submitted, and answers that try to cheat."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from world_play import play_expert

from ludus.core import ConfigError, Task, ToolCall, ToolContext, ToolResult
from ludus.envs import WORLDS
from ludus.rewards import Scorer, synthetic_episode
from ludus.worlds.code import (
    expert,
    held_out_tasks,
    humaneval_tasks,
    share,
    submit,
    submitted,
    success,
    training_tasks,
)

SECRET = "zebra-7391"
RIGHT = f"def animal(n):\n    return '{SECRET}' if n else 'cat'"
TASK = Task.of(
    "Write animal(n).",
    tests=[{"args": [0], "expected": "cat"}, {"args": [1], "expected": SECRET}],
    entry_point="animal",
)
# a test that asserts, as HumanEval's do
CHECKED = Task.of(
    "Write animal(n).",
    tests=f"def check(candidate):\n    assert candidate(0) == 'cat'\n    assert candidate(1) == '{SECRET}'\n",
    entry_point="animal",
)
SEARCH = """
import gc, glob
def holds(text):  # the expected value, which no variable and no text here holds
    return "".join(reversed("1937-arbez")) in text
def seen():
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple, set)) and holds(repr(thing)[:100_000]):
            yield type(thing)
    for pattern in ("/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ", "/tmp/**", "**"):
        for path in glob.glob(pattern, recursive=True):
            try:
                if holds(open(path, errors="replace").read(1_000_000)):
                    yield path
            except OSError:
                pass
"""
CHEATS = {
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits when called": "def animal(n):\n    import os\n    os._exit(0)",
    "prints a verdict": "print('passed'); print('OK'); print('2 passed')\ndef animal(n): return 'passed'",
    "is equal to everything": """
class Any(str):
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
def animal(n): return Any("cat")
""",
    "patches comparison": """
import builtins, operator
operator.eq = lambda a, b: True
builtins.AssertionError = type("E", (BaseException,), {})
def animal(n): return "cat"
""",
    "patches the test runner": """
import sys
for module in list(sys.modules.values()):
    for name in ("check", "run_tests", "equal_values", "main", "serve"):
        if hasattr(module, name):
            setattr(module, name, lambda *a, **k: True)
def animal(n): return "cat"
""",
    "looks for the tests": SEARCH
    + "def animal(n): return ''.join(reversed('1937-arbez')) if n and any(seen()) else 'cat'",
    "answers from a hook": """
import atexit, sys
atexit.register(lambda: print('{"passed": true}'))
sys.settrace(lambda *a: None)
def animal(n): return "cat"
""",
    "never returns": "def animal(n):\n    while True: pass",
    "is no Python": "def animal(n) return 1",
    "is nothing": "",
    "is noise": "\ud800\x00" * 10,
}


async def scored(reward: object, task: Task, answer: str) -> dict[str, float]:
    episode = synthetic_episode(task, answer)
    await Scorer([reward]).score(episode)
    assert episode.failure is None
    return episode.rewards


def test_tasks_are_stable_and_held_out_functions_are_new() -> None:
    train, held_out = training_tasks(), held_out_tasks()
    names = [{task.metadata["entry_point"] for task in tasks} for tasks in (train, held_out)]
    assert not names[0] & names[1] and len(names[0]) == len(train) == 330 and len(held_out) == 81
    assert {task.metadata["subtask"] for task in held_out} == {"algorithms", "numbers", "words"}
    assert train[17].id == "code-train-17"
    for task in [*train, *held_out]:  # what is asked for is shown, and its solution is not
        assert task.metadata["shown"].strip() in task.messages[0].content
        assert task.metadata["solution"].rsplit("return", 1)[1] not in task.messages[0].content
        assert all(set(case) == {"args", "expected"} for case in task.metadata["tests"])


@pytest.mark.parametrize("task", [TASK, CHECKED], ids=["cases", "assertions"])
async def test_only_the_right_function_passes(task: Task) -> None:
    assert (await scored(success, task, RIGHT))["success"] == 1.0
    assert (await scored(success, task, f"Here:\n```python\n{RIGHT}\n```"))["success"] == 1.0
    cheats = {name: source for name, source in CHEATS.items() if name != "never returns"}
    earned = {name: (await scored(success, task, source))["success"] for name, source in cheats.items()}
    assert earned == dict.fromkeys(cheats, 0.0)


async def test_the_share_of_the_tests_that_pass() -> None:
    parts = await scored(share, TASK, "def animal(n): return 'cat'")
    assert (parts["share"], parts["success"]) == (0.5, 0.0)
    parts = await scored(share, TASK, RIGHT)
    assert (parts["share"], parts["success"]) == (1.0, 1.0)


@pytest.mark.slow
async def test_an_endless_function_is_stopped() -> None:  # 5 s of CPU time for each of two tests
    assert (await scored(success, TASK, CHEATS["never returns"]))["success"] == 0.0


async def test_the_agents_session_sees_no_test() -> None:
    tools, context = WORLDS["code"].toolset(), ToolContext("e", TASK)
    await tools.open(context)
    result = await tools.call(ToolCall("python", {"code": f"{SEARCH}\nprint(list(seen()))"}), context)
    assert result.content == "[]" and result.fault is None
    await tools.close(context)


async def test_a_function_can_be_submitted_by_a_tool() -> None:
    assert await submit("x = 1") == ToolResult("submitted", terminated=True)
    episode = synthetic_episode(TASK, "I am done.")
    episode.actions[0].calls = (
        ToolCall("submit", {"code": "def animal(n): return 1"}),
        ToolCall("submit", {"code": RIGHT}),
    )
    assert submitted(episode) == RIGHT
    await Scorer([success]).score(episode)
    assert episode.rewards["success"] == 1.0


async def test_the_expert_solves_them_with_the_agents_tool() -> None:
    chosen = held_out_tasks()[::10]
    played = await play_expert("code", chosen)
    assert [t.rewards["success"] for t in played] == [1.0] * len(chosen)
    assert all(len(t.calls) == 1 and not t.faults for t in played)


@pytest.mark.slow
async def test_the_expert_solves_all_of_them() -> None:
    played = await play_expert("code", [*held_out_tasks(), *training_tasks()])
    assert [t.task.id for t in played if t.rewards["success"] != 1.0 or t.faults] == []


ROW = {
    "task_id": "Own/0",
    "prompt": "import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef quarter(x):\n"
    '    """A quarter.\n    >>> quarter(8) # of 8\n    2.0\n    """\n',
    "entry_point": "quarter",
    "canonical_solution": "    return half(half(x))\n",
    "test": "def check(candidate):\n    assert candidate(8) == half(half(8))\n"
    "    assert math.floor(candidate(6)) == 1\n",
}


async def test_files_in_humanevals_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUDUS_HUMANEVAL", raising=False)
    with pytest.raises(ConfigError, match="set LUDUS_HUMANEVAL"):
        humaneval_tasks()
    write(tmp_path / "problems.jsonl.gz", ROW)
    monkeypatch.setenv("LUDUS_HUMANEVAL", str(tmp_path / "problems.jsonl.gz"))
    (task,) = humaneval_tasks()
    assert "canonical" not in str(task.messages) and "candidate" not in str(task.messages)
    call, answer = list(expert(task))
    assert isinstance(call, ToolCall) and call.arguments["code"].endswith("print(quarter(8))")
    assert (await scored(success, task, str(answer)))["success"] == 1.0
    # the prompt's helpers are there for the answer, and the tests have their own
    assert (await scored(success, task, "def quarter(x): return half(x) / 2"))["success"] == 1.0
    cheat = "def half(x): return 7\ndef quarter(x): return 7"
    assert (await scored(success, task, cheat))["success"] == 0.0
    write(tmp_path / "problems.jsonl.gz", {**ROW, "entry_point": "third"})
    with pytest.raises(ConfigError, match="does not define third"):
        humaneval_tasks()


def write(path: Path, row: dict[str, str]) -> None:
    path.write_bytes(gzip.compress(json.dumps(row).encode()))


@pytest.mark.worlds
@pytest.mark.skipif("LUDUS_HUMANEVAL" not in os.environ, reason="LUDUS_HUMANEVAL is not set")
async def test_the_expert_solves_humaneval() -> None:
    tasks = humaneval_tasks()
    played = await play_expert("code", tasks)
    assert len(played) == 164 and [t.task.id for t in played if t.rewards["success"] != 1.0] == []
