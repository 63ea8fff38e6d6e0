"""Software engineering: the bundled bugs, hidden tests that cannot be tampered with, the demonstrator."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from world_play import play_expert

from container_image import IMAGE, files_of, import_image, packages
from ludus.core import ConfigError, Fault, InfraError, Task, ToolCall, ToolContext, ToolResult
from ludus.envs import WORLDS, EnvPool
from ludus.sandbox import SandboxError, Session, SessionLost, close_shared_sandboxes
from ludus.tools import LocalTools
from ludus.worlds.swe import SWE, expert, held_out_tasks, instance_tasks, training_tasks
from ludus.worlds.swe.instances import PytestTests, load_instance, without_protected
from ludus.worlds.swe.repository import HELD_OUT, BadTree, parse_repository, repositories, unpacked

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


async def worker(arguments: dict[str, Any] | None = None, **settings: Any) -> Worker:
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


async def _rewards(commands: dict[str, str]) -> dict[str, float]:
    """What a submission scores after each of some commands."""

    async def one(command: str) -> float:
        work = await worker()
        await work.bash(command)
        return (await work.scored())["reward"]

    return dict(zip(commands, await asyncio.gather(*map(one, commands.values())), strict=True))


async def test_tampering_gains_nothing() -> None:
    assert await _rewards(ATTACKS) == dict.fromkeys(ATTACKS, 0.0)


async def test_litter_beside_a_right_patch_costs_nothing() -> None:
    litter = "ln -s /proc/self/environ link; mkfifo pipe; touch $'a\\nb' $'\\xff'"
    harmless = ("sitecustomize", "conftest", "modules of the standard library", "a path file")
    commands = {name: f"{FIX}; {ATTACKS[name]}; {litter}" for name in harmless}
    assert await _rewards(commands) == dict.fromkeys(commands, 1.0)


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
        def protects(self, path: str, is_new: bool) -> bool:
            return False

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


# Tasks in SWE-bench's form

SOURCE = "def middle(values):\n    return sorted(values)[len(values) // 2]\n"
FIXED = """def middle(values):
    values = sorted(values)
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
"""
OLD_TEST = "from middles import middle\n\n\ndef test_odd():\n    assert middle([3, 1, 2]) == 2\n"
NEW_TEST = OLD_TEST + "\n\ndef test_even():\n    assert middle([4, 1, 2, 3]) == 2.5\n"


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with a bug, and a JSONL file with a task about it."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "middles"
    (folder / "tests").mkdir(parents=True)
    (folder / "middles.py").write_text(SOURCE)
    (folder / "tests" / "test_middle.py").write_text(OLD_TEST)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    base = git(folder, "rev-parse", "HEAD").strip()
    (folder / "middles.py").write_text(FIXED)
    patch = git(folder, "diff")
    git(folder, "checkout", "-q", "--", ".")
    (folder / "tests" / "test_middle.py").write_text(NEW_TEST)
    tests = git(folder, "diff")
    (folder / "middles.py").write_text("not what the commit has")
    row = {
        "instance_id": "lab__middles-1",
        "repo": "lab/middles",
        "problem_statement": "middle([1, 2]) should be 1.5",
        "base_commit": base,
        "patch": patch,
        "test_patch": tests,
        "FAIL_TO_PASS": json.dumps(["tests/test_middle.py::test_even"]),
        "PASS_TO_PASS": ["tests/test_middle.py::test_odd"],
        "checkout": "middles",
        "setup_command": "export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1",  # those of ours take seconds
    }
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path / "tasks.jsonl"


async def test_an_instance_of_a_local_checkout(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_SWE_TASKS", str(clone))
    [task] = instance_tasks()
    assert task.id == "lab__middles-1" and task.metadata["subtask"] == "lab/middles"
    assert "should be 1.5" in task.messages[-1].content
    assert not any("test_even" in str(message) for message in task.messages)
    work = await worker(dict(task.envs["swe"]))
    assert "sorted(values)[len" in await work.bash("cat middles.py"), "as the commit has it"
    assert "test_even" not in await work.bash("cat tests/*")
    assert (await work.scored()) == {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0}
    [played] = await play_expert("swe", [task])
    assert played.rewards["success"] == 1.0


@pytest.mark.parametrize("commit", ["--output={}", "--remote=. --exec=touch {}", "-v"])
def test_a_commit_is_no_option_of_git(clone: Path, commit: str, tmp_path: Path) -> None:
    [task] = instance_tasks(clone)
    written = tmp_path / "written"
    instance = task.envs["swe"]["instance"] | {"base_commit": commit.format(written)}
    with pytest.raises(ConfigError, match="is no name of a commit"):
        load_instance(instance)
    assert not written.exists()


@pytest.mark.parametrize("place", ["..", "middles/../..", "/", "../other"])
def test_a_checkout_lies_beside_its_task_file(clone: Path, place: str) -> None:
    row = json.loads(clone.read_text()) | {"checkout": place}
    clone.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=r"row 1: the checkout .* is outside of"):
        instance_tasks(clone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport():\\n"
        '    o = yield\\n    o.get_result().outcome = "passed"\\n\' > conftest.py',
        "echo > tests/test_middle.py",
        "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini",
        "mkdir pytest; echo 'print(\"PASSED tests/test_middle.py::test_even\")' > pytest/__main__.py; "
        "touch pytest/__init__.py",
        "echo 'print(\"short test summary info\\nPASSED tests/test_middle.py::test_even\")' >> middles.py",
        "rm -r tests; mkdir -p tests/test_middle.py",
    ],
)
async def test_pytest_obeys_the_original_files(clone: Path, attack: str) -> None:
    [task] = instance_tasks(clone)
    work = await worker(dict(task.envs["swe"]))
    await work.bash(attack)
    assert (await work.scored())["reward"] == 0.0


def test_rows_that_are_not_tasks_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem_statement": "x", "test_patch": ""}\n')
    with pytest.raises(ConfigError, match=r"row 1: no FAIL_TO_PASS, PASS_TO_PASS"):
        instance_tasks(file)
    with pytest.raises(ConfigError, match="set LUDUS_SWE_TASKS"):
        instance_tasks(tmp_path / "none.jsonl")
    row = {"instance_id": "Django__django-7", "problem_statement": "x", "test_patch": ""}
    file.write_text(json.dumps(row | {"FAIL_TO_PASS": [], "PASS_TO_PASS": "[]"}))
    [task] = instance_tasks(file)
    instance = task.envs["swe"]["instance"]
    assert instance["image"] == "swebench/sweb.eval.x86_64.django_1776_django-7:latest"
    assert "conda activate testbed" in instance["setup_command"]


def test_patches_lose_what_tests_protect() -> None:
    tests = PytestTests("+++ b/tests/test_a.py\n", "pytest")
    parts = [
        f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n"
        for name in (
            "src/a.py",
            "tests/test_a.py",
            "x/conftest.py",
            "json.py",
            "pytest/__init__.py",
            "a/json.py",
        )
    ]
    assert without_protected("".join(parts), tests) == parts[0] + parts[5]
    changed = "diff --git a/json.py b/json.py\n--- a/json.py\n+++ b/json.py\n"
    assert without_protected(changed, tests) == changed, "it was there before"


@pytest.fixture
def instance_in_image(clone: Path, container_engine: tuple[str, list[str]]) -> Task:
    """The same task with the repository in an image."""
    folder, name = clone.parent / "middles", "localhost/ludus-test-middles:1"
    git(folder, "checkout", "-q", "--", ".")
    testbed = {f"testbed/{file.relative_to(folder)}": file for file in files_of(folder)}
    runner = packages("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
    import_image(container_engine[1], name, testbed | runner)
    row = json.loads(clone.read_text())
    del row["checkout"]
    clone.write_text(json.dumps(row | {"image": name}))
    return instance_tasks(clone)[0]


@pytest.mark.worlds
async def test_an_instance_of_an_image(
    instance_in_image: Task, container_engine: tuple[str, list[str]]
) -> None:
    """The repository lies in the image; the agent commits, and leaves a file that pytest would obey."""
    task, (tier, program) = instance_in_image, container_engine
    container = {"program": program, "workdir": "/testbed", "pull": "never"}
    settings = {"sandbox": {"tier": tier, "container": container}}
    work = await worker(dict(task.envs["swe"]), **settings)
    assert await work.bash("git status --short; pwd") == "/testbed"
    assert (await work.scored()) == {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0}
    work = await worker(dict(task.envs["swe"]), **settings)
    [mend, _] = expert(task)
    await work.bash(mend.arguments["command"])
    who = "-c user.name=a -c user.email=a@b"
    await work.bash(
        f"echo 'import sys; sys.exit(0)' > conftest.py; git add middles.py; git {who} commit -qm done"
    )
    assert (await work.scored())["reward"] == 1.0


@pytest.mark.worlds
async def test_the_bundled_tasks_run_in_containers_too(container_engine: tuple[str, list[str]]) -> None:
    tier, program = container_engine
    container = {"program": program, "image": IMAGE, "workdir": "/work", "pull": "never"}
    for task in held_out_tasks()[::6]:
        work = await worker(dict(task.envs["swe"]), sandbox={"tier": tier, "container": container})
        for call in expert(task):
            if call.name != "submit":
                result = await work.call(call.name, **call.arguments)
                assert result.fault is None
        assert result.content == "passed"
        assert (await work.scored())["reward"] == 1.0
