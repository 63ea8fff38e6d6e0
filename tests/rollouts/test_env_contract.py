"""`ludus check env`: each clause of an environment's contract is found broken where it is, and only there."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.core import ConfigError, Task, ToolCall, ToolFault
from ludus.envs import Env, EnvPool, Step
from ludus.envs.env import Isolation
from ludus.rollouts.env_contract import Clause, EnvContract, check_env

TASKS = [Task.of("Count.", id=f"t{n}", target=str(n)) for n in range(2, 5)]


class Count(Env):
    """Count up to the task's number; "up" is the only word it knows."""

    def reset(self, task: Task) -> str:
        self.count, self.goal = 0, int(str(task.target))
        return f"count to {self.goal}"

    def step(self, action: str) -> Step:
        if self.count >= self.goal:
            return Step("It is over.", terminated=True)
        if action != "up":
            raise ToolFault("say up")
        self.count += 1
        done = self.count == self.goal
        return Step(str(self.count), reward=float(done), terminated=done)

    def available_actions(self) -> list[str]:
        return ["up", "down"]


def expert(task: Task) -> Generator[ToolCall, str, None]:
    while True:
        yield ToolCall("step", {"action": "up"})


class Dice(Count):
    def step(self, action: str) -> Step:
        return Step(str(random.random()))


class Forgetful(Count):
    def __init__(self) -> None:
        self.episodes = 0

    def reset(self, task: Task) -> str:
        self.episodes += 1
        return f"{super().reset(task)} {self.episodes}"


class Brittle(Count):
    def step(self, action: str) -> Step:
        words = {"up": "up", "down": "down"}
        return super().step(words[action])


class Generous(Count):
    def step(self, action: str) -> Step:
        return Step("more", reward=1.0, terminated=True)


class Endless(Count):
    def step(self, action: str) -> Step:
        step = super().step(action)
        return step if step.reward else Step("go on")


class ClosedOnce(Count):
    def __init__(self) -> None:
        self.open = True

    def close(self) -> None:
        if not self.open:
            raise OSError("closed already")
        self.open = False


class Shared(Count):
    """Counts in one place for all instances, which shows when they take turns."""

    total: ClassVar[itertools.count[int]] = itertools.count()

    def reset(self, task: Task) -> str:
        Shared.total = itertools.count()
        return super().reset(task)

    async def step(self, action: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        return Step(str(next(Shared.total)))


class Files(Count):
    held: ClassVar[list[int]] = []

    def reset(self, task: Task) -> str:
        self.held.append(os.open("/dev/null", os.O_RDONLY))
        return super().reset(task)


class Threads(Count):
    go: ClassVar[threading.Event] = threading.Event()

    def reset(self, task: Task) -> str:
        threading.Thread(target=self.go.wait, daemon=True).start()
        return super().reset(task)


class Memory(Count):
    held: ClassVar[list[bytes]] = []

    def reset(self, task: Task) -> str:
        self.held.append(os.urandom(3 * 2**20))
        return super().reset(task)


async def proved(kind: type[Env], **settings: Any) -> dict[str, Clause]:
    contract = EnvContract(kind, TASKS, "count", **{"expert": expert, "max_turns": 8, **settings})
    return {clause.name: clause async for clause in contract.clauses()}


async def test_tasks_of_every_kind_are_tried() -> None:
    """A set is often sorted by its kinds of tasks."""
    seen: dict[str, Counter[str]] = {}

    class Watched(Count):
        def reset(self, task: Task) -> str:
            seen.setdefault(clause[0], Counter())[str(task.metadata["kind"])] += 1
            return super().reset(task)

    clause = ["determinism"]
    made = [
        replace(TASKS[0], id=f"{kind}{n}", metadata={"kind": kind})
        for kind in "abcde"
        for n in range(40)
    ]
    contract = EnvContract(
        Watched, made, "count", expert=expert, max_turns=8, sample=3, gold=5, episodes=20
    )
    async for found in contract.clauses():
        assert found.ok is not False, found
        clause[0] = {"leaks": "gold solution"}.get(found.name, found.name + " is over")
    assert len(seen["determinism"]) == 3
    assert len(seen["concurrent instances is over"]) == 5, "leaks"
    assert len(seen["gold solution"]) == 5


async def test_a_good_one_keeps_every_clause() -> None:
    found = await proved(Count, instances=16)
    assert {name: clause.ok for name, clause in found.items()} == {
        "determinism": True,
        "reset after done": True,
        "bad actions": True,
        "action after done": True,
        "close twice": True,
        "concurrent instances": True,
        "leaks": True,
        "gold solution": True,
        "random policy": None,
    }
    assert "3 of 3 tasks, in at most 4 turns" in found["gold solution"].text
    assert "succeeds on" in found["random policy"].text
    assert "gold solution" not in await proved(Count, expert=None)


class TextPaid(Env):
    def reset(self, task: Task) -> str:
        return "go"

    def step(self, action: str) -> Step:
        return Step("ok", "one", True)  # type: ignore[arg-type]


@pytest.fixture
def released() -> Any:
    Threads.go = threading.Event()
    yield
    for file in Files.held:
        os.close(file)
    Files.held.clear()
    Memory.held.clear()
    Threads.go.set()


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(
    ("kind", "clause", "text"),
    [
        (Dice, "determinism", "led to something else in a second instance"),
        (Forgetful, "reset after done", "the first observation led to something else after a reset"),
        (Brittle, "bad actions", "'step' with an unknown action raised KeyError: 'no such action'"),
        (Generous, "action after done", "the reward 1; an ended episode pays no more"),
        (Endless, "action after done", "as if it went on"),
        (ClosedOnce, "close twice", "closed already"),
        (Shared, "concurrent instances", "with 4 instances at once"),
        (Files, "leaks", "+10 open files"),
        (Threads, "leaks", "0 threads"),
        (Memory, "leaks", "MB"),
        (Dice, "gold solution", "succeeds on 0 of 3 tasks"),
        (Dice, "gold solution", "a reward called 'success' of at least 1; without one, a total of at"),
    ],
)
async def test_a_broken_clause_is_found_and_says_what_is_wrong(
    kind: type[Env], clause: str, text: str
) -> None:
    found = await proved(kind, gold=3)
    assert found[clause].ok is False and text in found[clause].text, found[clause]
    if kind not in (Dice, Forgetful, Shared, Generous, Endless):
        assert [name for name, one in found.items() if one.ok is False] == [clause]


async def test_one_that_hangs_or_cannot_be_made_fails_its_clauses_and_the_check_goes_on() -> None:
    class Hangs(Count):
        async def step(self, action: str) -> Step:  # type: ignore[override]
            await asyncio.sleep(60)
            return Step("")

    class Refuses(Count):
        def __init__(self) -> None:
            raise RuntimeError("no display")

    found = await proved(Hangs, seconds=0.05)
    assert found["determinism"].text == "it did not end within 0.05 seconds"
    assert len(found) == 9
    found = await proved(Refuses)
    assert "no display" in found["close twice"].text and not any(one.ok for one in found.values())


@pytest.mark.parametrize("lives", ["thread", "process"])
async def test_a_reward_that_is_text_is_named_with_its_environment(lives: Isolation) -> None:
    found = [one.text for one in await check_env(TextPaid, None, isolation=lives)]
    told = "tool 'step' of TextPaid gave the reward 'one', which is no finite number"
    assert any(told in text for text in found), found


async def test_a_class_that_needs_arguments_is_a_sentence() -> None:
    class Sized(Count):
        def __init__(self, size: int, *more: int, depth: int = 1) -> None:
            super().__init__()

    told = (
        r"'sized' cannot be made without the argument\(s\) size: give options = \{ size = \.\.\. \} in"
    )
    with pytest.raises(ConfigError, match=told):
        await check_env(Sized, None, name="sized")
    async with EnvPool(Sized, name="sized", options={"size": 3}).new_instance() as env:
        assert isinstance(env, Sized)


def test_the_command_prints_a_line_for_each_and_fails_where_one_is_broken(tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(
        "import ludus\n"
        "from ludus.envs import Step\n"
        "class Odd(ludus.Env):\n"
        "    def reset(self, task):\n"
        "        return 'go'\n"
        "    def step(self, action):\n"
        "        return Step('won', reward=1.0, terminated=True)\n"
        "class Even(Odd):\n"
        "    isolation = 'process'\n"
        "    def reset(self, task):\n"
        "        self.over = False\n"
        "        return 'go'\n"
        "    def step(self, action):\n"
        "        over, self.over = self.over, True\n"
        "        return Step('over') if over else Step('won', 1.0, True)\n"
        "class Good(Odd):\n"
        "    def reset(self, task):\n"
        "        self.over = False\n"
        "        return 'go'\n"
        "    def step(self, action):\n"
        "        over, self.over = self.over, True\n"
        "        return Step('won', None if over else 1.0, True)\n"
        "def expert(task):\n"
        "    yield ludus.ToolCall('step', {'action': 'x'})\n"
    )
    path, runner = tmp_path / "games.py", CliRunner()
    done = runner.invoke(app, ["check", "env", f"{path}:Odd", "--episodes", "4"])
    assert done.exit_code == 1 and "failed: action after done" in done.output
    assert "ok: determinism: 1 task and 1 actions" in done.output
    done = runner.invoke(app, ["check", "env", f"{path}:Good", "--expert", f"{path}:expert"])
    assert done.exit_code == 0 and "ok: gold solution: the expert succeeds on 1 of 1" in done.output
    assert "in 10 of 20 episodes" in done.output
    done = runner.invoke(app, ["check", "env", f"{path}:Even", "--episodes", "2"])
    assert "failed: action after done" in done.output and "as if it went on" in done.output, (
        "in a process"
    )
    assert done.output.count("ok: ") == 6


async def test_an_expert_that_never_yields_is_waited_for_once() -> None:
    asked, gate = [], threading.Event()

    def stuck(task: Task) -> Generator[ToolCall, str, None]:
        asked.append(task.id)
        gate.wait(20)  # in a thread: the checker goes on without it
        yield ToolCall("step", {"action": "up"})

    contract = EnvContract(Count, TASKS, "count", expert=stuck, seconds=1.0, episodes=2)
    try:
        found = {clause.name: clause async for clause in contract.clauses()}
    finally:
        gate.set()
    assert len(asked) == 1
    for name in ("reset after done", "action after done", "gold solution"):
        assert found[name].ok is False
        assert "the expert yielded nothing within 0.5 seconds" in found[name].text
        assert "test_env_contract.py" in found[name].text and "in stuck" in found[name].text
    assert found["determinism"].ok and found["random policy"].ok is None
