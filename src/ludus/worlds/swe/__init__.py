"""Software engineering: mend a bug in a small repository, from the text of an issue.

The agent has a shell and the file tools in a sandbox session whose working directory is the repository. When
it submits, hidden tests run on its files in a fresh session: those that the bug breaks (fail-to-pass) and all
others (pass-to-pass), as in SWE-bench. The reward is 1 if it ended by itself and all of them pass.

`training_tasks` and `held_out_tasks` are bundled; `instance_tasks` loads tasks in SWE-bench's form.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from ludus.core.failures import ToolFault
from ludus.core.messages import ToolCall, ToolContext, ToolResult
from ludus.core.task import Task
from ludus.envs.env import Env, own_tools
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.rewards.code_tests.fault_attribution import SandboxFactory, score_with_control
from ludus.sandbox import Limits, SandboxConfig, Session, SessionEnded
from ludus.tools import tool
from ludus.tools.library.files import FILES, FileOptions
from ludus.tools.library.sandbox import BASH, EpisodeSessions, ProgramOptions, SessionLease, SessionStart
from ludus.worlds.swe.instances import (
    PytestTests,
    apply_patch,
    base_commit,
    instance_tasks,
    load_instance,
    read_patch,
    without_protected,
)
from ludus.worlds.swe.repository import (
    HELD_OUT,
    BadTree,
    ExampleTests,
    RepositoryTask,
    Tree,
    find_bug,
    read_tree,
    repositories,
)

STEP_SECONDS, REWARD_SECONDS = 90.0, 300.0
"""As VerlTool has them; the episode's 20 minutes are `budgets.max_seconds`."""
LIMITS = Limits(
    wall_seconds=STEP_SECONDS,
    cpu_seconds=STEP_SECONDS,
    memory_mb=1024,
    processes=128,
    open_files=1024,
    disk_mb=256,
)
SYSTEM = (
    "You mend bugs in a repository of Python code, which is the working directory of your tools. Find the "
    "cause of the issue, change the code so that it is gone, run the tests, and submit. Hidden tests decide: "
    "they check what the issue asks for, and that all else still works."
)
_OVER = "The work is submitted, and the episode is over."
_SESSION = "repository"
_NOTHING = {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 0.0}
__all__ = [
    "SWE",
    "expert",
    "held_out_tasks",
    "instance_tasks",
    "success",
    "training_tasks",
]


class SWE(Env):
    """A repository with an issue; `envs = {"swe": {"repository": "routes", "bug": "unescaped"}}` in a task."""

    step_timeout = STEP_SECONDS + 30.0

    def __init__(
        self,
        sandbox: SandboxConfig | Mapping[str, Any] | None = None,
        step_seconds: float = STEP_SECONDS,
        reward_seconds: float = REWARD_SECONDS,
    ) -> None:
        """`sandbox` may choose another tier (docs/sandbox.md); in a recipe: [agent.pools.swe.options]."""
        if isinstance(sandbox, Mapping):
            limits = LIMITS.model_dump() | dict(sandbox.get("limits", {}))
            sandbox = SandboxConfig.parse(
                {**sandbox, "limits": limits}, "agent.pools.swe.options.sandbox"
            )
        self.config = sandbox or SandboxConfig(limits=LIMITS)
        self.reward_seconds = reward_seconds
        self.problem: RepositoryTask | None = None
        self.submitted = False
        self._submission: Tree | str | None = None
        """The files, or a patch where the repository lies in an image."""
        self._workspace = _Workspace(self)
        options = ProgramOptions(seconds=step_seconds)
        self._tools = [
            *BASH.build(options, self._workspace),
            *FILES.build(FileOptions(), self._workspace),
        ]

    async def reset(
        self,
        task: Task,
        repository: str = "",
        bug: str = "",
        instance: Mapping[str, Any] | None = None,
    ) -> None:
        await self._workspace.leave()
        if instance is not None:
            self.problem = await asyncio.to_thread(load_instance, instance)
        else:
            self.problem = _bundled(repository, bug)
        self.submitted, self._submission = False, None

    def tools(self) -> list[Any]:
        return [*self._tools, *own_tools(self)]

    @tool
    async def submit(self) -> ToolResult:
        """Submit the repository as it is now. This ends the episode: run the tests before."""
        if self.submitted:
            return ToolResult(_OVER, terminated=True)
        try:
            self._submission = await self._workspace.submission()
        except (BadTree, SessionEnded) as error:
            self.submitted = True  # without files: it scores 0
            return ToolResult(f"Submitted, but {error}.", terminated=True)
        self.submitted = True
        return ToolResult("Submitted.", terminated=True)

    async def score(self) -> dict[str, float]:
        """Result of hidden tests on the submitted files: `reward` and the shares of both kinds that pass."""
        problem, submission = self._now(), self._submission
        if submission is None:
            return dict(_NOTHING)

        async def scored(which: str, sandboxes: SandboxFactory) -> dict[str, float]:
            changes = submission if which == "submitted" else "" if problem.image else problem.files
            limits = self.config.limits.model_copy(
                update={"cpu_seconds": self.reward_seconds, "output_bytes": 4 << 20}
            )
            sandbox = sandboxes(self.config)
            async with await sandbox.session(limits=limits, image=problem.image) as session:
                if not await _prepared(session, problem, changes):
                    return dict(_NOTHING)
                passed = await problem.tests.run(session, self.reward_seconds)
            return _shares(problem, passed)

        # what the submitted files break is their own fault, unless the original files break it, too
        return await score_with_control("success", scored, "submitted", "original")

    async def close(self) -> None:
        await self._workspace.leave()

    def render(self) -> str:
        return f"{'submitted' if self.submitted else 'at work'}: {sorted(self._now().files)}"

    def _now(self) -> RepositoryTask:
        if self.problem is None:
            raise RuntimeError("reset it first")
        return self.problem


class _Workspace(EpisodeSessions):
    """The session of one environment, with the repository in it; a session that the agent ends starts anew."""

    def __init__(self, env: SWE) -> None:
        super().__init__(env.config)
        self._env = env
        self._base = ""
        """The commit of an image's repository."""

    @asynccontextmanager
    async def use(self, context: ToolContext) -> AsyncIterator[SessionLease]:
        if self._env.submitted:
            raise ToolFault(_OVER)
        async with super().use(replace(context, episode=_SESSION)) as lease:
            yield lease

    async def submission(self) -> Tree | str:
        """The files, or the changes, as they are now; the original ones where nothing was done."""
        held, problem = self._held.get(_SESSION), self._env._now()
        if held is None or held.session is None:
            return "" if problem.image else problem.files
        async with held.turn:
            if problem.image:
                return await read_patch(held.session, self._base)
            return await read_tree(held.session)

    async def leave(self) -> None:
        await self.close(ToolContext(_SESSION, Task()))

    def start_of(self, task: Task) -> SessionStart:
        problem = self._env._now()
        return SessionStart(files=dict(problem.files), image=problem.image)

    async def _opened(self, task: Task) -> Session:
        session = await super()._opened(task)
        try:
            if self._env._now().image:
                self._base = await base_commit(session)
        except BaseException:
            await session.close()
            raise
        return session


def _bundled(repository: str, bug: str) -> RepositoryTask:
    found, its = find_bug(repository, bug)
    files = {name: text.encode() for name, text in found.with_bug(its).items()}
    others = tuple(name for name in found.tests if name not in its.fails)
    return RepositoryTask(files, ExampleTests(found.tests, found.setup), its.fails, others)


async def _prepared(session: Session, problem: RepositoryTask, changes: Tree | str) -> bool:
    """Put the changes into a fresh session; whether they fit."""
    if not isinstance(changes, str):
        await session.put(problem.taken_over(changes))
        return True
    assert isinstance(problem.tests, PytestTests)
    return await apply_patch(session, without_protected(changes, problem.tests))


def _shares(problem: RepositoryTask, passed: Mapping[str, bool]) -> dict[str, float]:
    shares = {}
    for kind, names in (("fail_to_pass", problem.fail_to_pass), ("pass_to_pass", problem.pass_to_pass)):
        shares[kind] = sum(passed.get(name, False) for name in names) / len(names) if names else 1.0
    return {"reward": float(all(share == 1.0 for share in shares.values())), **shares}


# no timeout: the sandbox has deadlines, and waiting for a place in it is not the model's fault
@reward(name="success", timeout=None)
async def success(env: SWE) -> dict[str, float]:
    """1 if the agent submitted and all hidden tests pass; the shares that pass are logged beside it."""
    return await env.score()


def training_tasks() -> list[Task]:
    """Bugs of seven repositories."""
    return _tasks("train", held_out=False)


def held_out_tasks() -> list[Task]:
    """Bugs of three repositories that no training task is about."""
    return _tasks("held-out", held_out=True)


def _tasks(split: str, held_out: bool) -> list[Task]:
    return [
        Task.of(
            f"Repository: {one.name}\nIssue: {bug.issue}",
            id=f"swe-{split}-{one.name}-{bug.name}",
            system=SYSTEM,
            envs={"swe": {"repository": one.name, "bug": bug.name}},
            metadata={"subtask": bug.kind},
        )
        for one in repositories().values()
        for bug in one.bugs.values()
        if (one.name in HELD_OUT) == held_out
    ]


def expert(task: Task) -> Generator[ToolCall, str, None]:
    """The gold patch through the agent's own tools: look, edit, run the visible tests, submit."""
    if "instance" in task.envs["swe"]:
        patch = f"git apply <<'END_OF_PATCH'\n{task.metadata['patch'].rstrip()}\nEND_OF_PATCH"
        yield ToolCall("bash", {"command": patch})
        yield ToolCall("submit")
        return
    repository, bug = find_bug(**task.envs["swe"])
    yield ToolCall("view_file", {"path": bug.edits[0].file})
    for edit in bug.edits:
        yield ToolCall("replace_in_file", {"path": edit.file, "old": edit.broken, "new": edit.correct})
    yield ToolCall("bash", {"command": f"python3 -m doctest tests/{repository.name}.txt && echo passed"})
    yield ToolCall("submit")


WORLD = World(
    "swe",
    "Mend a bug in a small repository, from the text of an issue; hidden tests decide.",
    env=SWE,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    programs=("bash", "tar"),
    max_turns=30,
)
