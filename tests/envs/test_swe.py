"""Software engineering: the bundled bugs, hidden tests that cannot be tampered with, the demonstrator."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import pytest
from world_play import play_expert

from ludus.core import ConfigError, Fault, InfraError, Task, ToolCall, ToolContext, ToolResult
from ludus.envs import WORLDS, EnvPool
from ludus.envs.swe import SWE, expert, held_out_tasks, training_tasks
from ludus.envs.swe.repository import HELD_OUT, parse_repository, repositories
from ludus.envs.swe.scoring import BadTree, unpacked
from ludus.sandbox import SandboxError, Session, SessionLost, close_shared_sandboxes
from ludus.tools import LocalTools

ALL = [*training_tasks(), *held_out_tasks()]
BUG = {"repository": "intervals", "bug": "touching"}
FILE = "intervals/interval_set.py"
FIX = "sed -i 's/high <= start or low >= end/high < start or low > end/' " + FILE


@pytest.fixture(autouse=True)
async def sandboxes() -> AsyncIterator[None]:
    yield
    await close_shared_sandboxes()


class Worker:
    """An environment and its tools, called as a model calls them."""

    def __init__(self, env: SWE, task: Task) -> None:
        self.env, self.task = env, task

    async def call(self, name: str, **arguments: Any) -> ToolResult:
        context = ToolContext("test", self.task, {"swe": self.env})
        return await LocalTools(self.env.tools()).call(ToolCall(name, arguments), context)

    async def bash(self, command: str) -> str:
        return (await self.call("bash", command=command)).content

    async def scored(self) -> dict[str, float]:
        await self.call("submit")
        try:
            return await self.env.score()
        finally:
            await self.env.close()


async def worker(arguments: dict[str, str] | None = None, **settings: Any) -> Worker:
    env, task = SWE(**settings), Task.of("mend it")
    await env.reset(task, **(arguments or BUG))
    return Worker(env, task)


def test_enough_bugs_split_by_repository() -> None:
    train, held_out = training_tasks(), held_out_tasks()
    assert len(train) >= 30 and len(held_out) >= 10
    assert {task.envs["swe"]["repository"] for task in held_out} == set(HELD_OUT)
    assert not set(HELD_OUT) & {task.envs["swe"]["repository"] for task in train}
    assert len({task.metadata["subtask"] for task in train}) >= 12, "kinds of bugs"
    assert train[0].id == "swe-train-daterange-december"


def test_what_the_agent_gets_does_not_give_the_answer_away() -> None:
    for repository in repositories().values():
        for bug in repository.bugs.values():
            files = repository.with_bug(bug)
            shown = "\n".join(files.values())
            assert all(files[edit.file].count(edit.broken) == 1 for edit in bug.edits), bug.name
            assert not any(repository.tests[name] in shown for name in bug.fails)
            assert all(
                repository.tests[name] in shown for name in repository.tests if name not in bug.fails
            )


async def _bug_and_fix(tasks: list[Task]) -> None:
    for task in tasks:
        before = await (await worker(dict(task.envs["swe"]))).scored()
        assert before == {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0}, task.id
    played = await play_expert("swe", tasks)
    assert [one.rewards["success"] for one in played] == [1.0] * len(tasks)
    assert all(one.turns == len(list(expert(one.task))) and not one.faults for one in played)


async def test_bugs_break_their_tests_and_the_gold_patch_mends_them() -> None:
    await _bug_and_fix(ALL[::11])


@pytest.mark.slow
async def test_every_bug_breaks_its_tests_and_its_gold_patch_mends_them() -> None:
    await _bug_and_fix(ALL)


async def test_the_tools_work_in_one_session_in_the_repository() -> None:
    work = await worker()
    assert await work.bash("ls") == "README.md\nintervals\ntests"
    assert "Adjacent" not in await work.bash("cat README.md tests/*")
    await work.call(
        "replace_in_file", path=FILE, old="high <= start or low >= end", new="high < start or low > end"
    )
    assert (
        await work.bash("cd intervals; git --version >/dev/null; grep -c 'high < start' interval_set.py")
        == "1"
    )
    assert await work.bash("basename $PWD") == "intervals", "the shell keeps its folder"
    assert (await work.call("submit")).terminated
    after = await work.call("bash", command="echo on")
    assert after.fault is Fault.TOOL_RAISED and "over" in after.content
    assert (await work.call("submit")).terminated
    assert (await work.env.score())["reward"] == 1.0
    await work.env.close()


async def test_only_a_submission_is_scored() -> None:
    work = await worker()
    await work.bash(FIX)
    assert (await work.env.score())["reward"] == 0.0, "it must end by itself"
    assert (await work.scored())["reward"] == 1.0


async def test_a_mended_bug_that_breaks_something_else_scores_nothing() -> None:
    work = await worker()
    await work.bash(f"{FIX}; sed -i 's/high - low/high + low/' {FILE}")
    scored = await work.scored()
    assert (
        scored["reward"] == 0.0 and scored["fail_to_pass"] == 1.0 and 0.5 < scored["pass_to_pass"] < 1.0
    )


_PARENT = "import os; [os.write(os.open(f'/proc/{p}/fd/1', 1), b'{}') for p in (os.getppid(), 1)]"
_PATCHED = (
    "import builtins, io, json, os; builtins.repr = lambda x: 'IntervalSet([(1, 5)])'; "
    "io.StringIO.getvalue = lambda s: ''; os._exit = print"
)
_SHADOWS = (
    "for m in json io doctest traceback os signal; do echo 'import sys; sys.exit(0)' > $m.py; done"
)
ATTACKS = {
    "exit at import": "echo 'import os; os._exit(0)' > intervals/__init__.py",
    "SystemExit at import": "echo 'raise SystemExit(0)' > intervals/__init__.py",
    "sitecustomize": "echo 'import os; os._exit(0)' | tee sitecustomize.py usercustomize.py",
    "conftest": "printf 'def pytest_collection_modifyitems(items): items.clear()' > conftest.py",
    "modules of the standard library": _SHADOWS,
    "a path file": "echo 'import os; os._exit(0)' > x.pth",
    "patched builtins": f'printf "%s" "{_PATCHED}" >> intervals/__init__.py',
    "forged report": f'printf "%s" "{_PARENT}" >> intervals/__init__.py',
    "always equal": f"echo 'IntervalSet.__repr__ = lambda s: chr(73)' >> {FILE}",
    "symlink out": "rm -r intervals; ln -s / intervals; ln -s /etc/passwd README",
    "no tests": "rm -r tests",
    "rewritten tests": "echo > tests/intervals.txt",
    "unreadable": f"chmod 000 {FILE}",
    "gone": "rm -rf -- * .[a-z]*",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_tampering_gains_nothing(attack: str) -> None:
    work = await worker()
    await work.bash(attack)
    assert (await work.scored())["reward"] == 0.0


@pytest.mark.parametrize(
    "attack", ["sitecustomize", "conftest", "modules of the standard library", "a path file"]
)
async def test_litter_beside_a_right_patch_costs_nothing(attack: str) -> None:
    work = await worker()
    await work.bash(
        f"{FIX}; {ATTACKS[attack]}; ln -s /proc/self/environ link; mkfifo pipe; touch $'a\\nb' $'\\xff'"
    )
    assert (await work.scored())["reward"] == 1.0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("for i in $(seq 5100); do : > f$i; done", "more than 5,000 files"),
        ("head -c 17000000 /dev/zero > big", "larger than 16 MB"),
        ("cat /dev/zero > full", ""),
    ],
)
async def test_a_huge_tree_is_refused(command: str, said: str) -> None:
    work = await worker()
    await work.bash(f"{FIX}; {command}")
    answer = await work.call("submit")
    assert answer.terminated and said in answer.content
    assert (await work.env.score())["reward"] == 0.0
    await work.env.close()


async def test_code_that_hangs_costs_its_time_and_no_more() -> None:
    work = await worker(reward_seconds=1.0, step_seconds=0.3)
    slow = await work.call("bash", command="sleep 20")
    assert slow.fault is Fault.TOOL_TIMEOUT and "longer than 0.3" in slow.content
    await work.bash("echo 'while True: pass' >> intervals/__init__.py")
    assert (await work.scored())["reward"] == 0.0


async def test_a_session_that_the_agent_ends_starts_anew() -> None:
    work = await worker()
    ended = await work.bash(f"{FIX}; yes | head -c 30000000")
    assert "session ended" in ended
    assert "new session" in await work.bash("true")
    assert "high <= start" in await work.bash(f"cat {FILE}"), "the repository as it was"
    assert (await work.scored())["fail_to_pass"] == 0.0


async def test_failures_of_ours_are_no_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[str] = []

    class Tests:
        async def run(self, session: Session, seconds: float) -> dict[str, bool]:
            text = (await session.read(FILE)).decode()
            if any(one in text for one in broken):
                raise SessionLost("the machine is on fire")
            return {}

    work = await worker()
    await work.bash(FIX)
    assert (await work.call("submit")).terminated
    problem = work.env.problem
    assert problem is not None
    monkeypatch.setattr(work.env, "problem", type(problem)(problem.files, Tests(), ("x",), ()))
    broken[:] = ["class IntervalSet"]
    with pytest.raises(InfraError, match="on fire"):
        await work.env.score()
    broken[:] = ["high < start"]  # only with the submitted files: their fault
    assert (await work.env.score())["reward"] == 0.0
    await work.env.close()


async def test_a_sandbox_that_cannot_start_is_a_typed_failure() -> None:
    work = await worker(sandbox={"preload": ["no_such_module"]})
    with pytest.raises(InfraError) as raised:
        await work.bash("true")
    assert isinstance(raised.value, SandboxError) or raised.value.boundary == "sandbox"


def test_archives_are_data_of_somebody_else() -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("ok.py", "../out.py", "/abs.py", "a/../../b.py", "s\udcff.py"):
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"hi"))
        link = tarfile.TarInfo("link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert unpacked(made.getvalue()) == {"ok.py": b"hi"}
    with pytest.raises(BadTree):
        unpacked(b"no archive at all" * 100)


def test_names_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match="no bug 'x' in intervals; there are: touching"):
        list(expert(Task.of("x", envs={"swe": {"repository": "intervals", "bug": "x"}})))
    with pytest.raises(ConfigError, match="no repository 'y'; there are: daterange"):
        list(expert(Task.of("x", envs={"swe": {"repository": "y", "bug": "x"}})))
    with pytest.raises(ValueError, match="'what' is not known"):
        parse_repository("x", "@@ what\n")


def test_settings_reach_the_class_by_the_pool() -> None:
    pool = EnvPool(SWE, name="swe", size=1, options={"step_seconds": 5})
    assert pool.step_timeout == 120.0
    with pytest.raises(ConfigError, match=r"agent.pools.swe.options: .*'seconds'.*step_seconds"):
        EnvPool(SWE, name="swe", size=1, options={"seconds": 5})


def test_its_recipe_has_the_papers_numbers() -> None:
    from ludus.training import load_recipe

    recipe = load_recipe("swe")
    assert recipe.budgets.max_seconds == 1200.0
    assert recipe.budgets.max_turns == WORLDS["swe"].max_turns
