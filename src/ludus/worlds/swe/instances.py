"""Tasks in the form of SWE-bench: rows with an issue, a test patch, and the tests that have to pass.

Each row of a JSONL file is one task: `instance_id`, `problem_statement`, `test_patch`, `FAIL_TO_PASS` and
`PASS_TO_PASS` (lists, or lists as JSON), `patch` (the gold patch, for the demonstrator alone), `repo`. The
repository is either a folder of this machine (`checkout`, relative to the file, at `base_commit` if that is
given and it is a clone), which runs on every tier; or lies in an image (`image`, or SWE-bench's own for that
id), which needs a tier with containers. Optional: `test_command`, to which the test files are added, and
`setup_command`, which comes before it.

These tests run in one process with the agent's code, as in SWE-bench. Files that pytest would obey are taken
from the original repository; code that forges pytest's report from inside is not noticed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.sandbox import Session
from ludus.worlds import data_path, read_rows
from ludus.worlds.swe.repository import MOST_TREE, BadTree, RepositoryTask, unpacked

TASKS = "LUDUS_SWE_TASKS"
TEST_COMMAND = "python3 -m pytest -rA --tb=no --show-capture=no -q -p no:cacheprovider"
_IMAGE = "swebench/sweb.eval.x86_64.{id}:latest"
_IMAGE_SETUP = "source /opt/miniconda3/bin/activate && conda activate testbed"
_PROMPT = "Repository: {repo}\nIssue: {issue}"
_FIELDS = ("test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
_HEADER = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)
_SECTION = re.compile(r"^(?=diff --git )", re.MULTILINE)
_PATHS = re.compile(r'^diff --git "?a/(.+?)"? "?b/(.+?)"?$', re.MULTILINE)
_STATUS = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|SKIPPED|XPASS) (\S+)", re.MULTILINE)
_OBEYED = {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "sitecustomize.py", "usercustomize.py"}
_PASSED = {"PASSED", "XFAIL"}
_OWN = {"pytest", "_pytest", "pluggy", *sys.stdlib_module_names}
# An index of our own: the agent may have used git, too.
_DIFF = """
export GIT_INDEX_FILE=/tmp/.ludus-index
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
rm -f "$GIT_INDEX_FILE"
git read-tree "$1" && git add -A . &&
git diff --cached --binary --no-ext-diff --no-textconv --no-renames "$1" > /tmp/.ludus-patch
"""


def instance_tasks(path: str | Path | None = None) -> list[Task]:
    """The tasks of a JSONL file; LUDUS_SWE_TASKS names it where no path is given."""
    file = Path(path) if path else data_path(TASKS, "a JSONL file with tasks in SWE-bench's form")
    if not file.is_file():
        raise ConfigError(f"set {TASKS} to a JSONL file with SWE-bench's tasks ({str(file)!r} is none)")
    return [_task(row, file, number) for number, row in enumerate(read_rows(file), start=1)]


def _task(row: Mapping[str, Any], file: Path, number: int) -> Task:
    if missing := [name for name in ("problem_statement", *_FIELDS) if name not in row]:
        raise ConfigError(
            f"{file}, row {number}: no {', '.join(missing)}, which tasks of SWE-bench have"
        )
    name = str(row.get("instance_id") or f"{file.stem}-{number}")
    instance = {
        key: row[key] for key in (*_FIELDS, "test_command", "setup_command", "base_commit") if key in row
    }
    if "checkout" in row:
        checkout = Path(os.path.normpath(file.parent / str(row["checkout"])))
        if not checkout.is_relative_to(os.path.normpath(file.parent)):
            raise ConfigError(
                f"{file}, row {number}: the checkout {row['checkout']!r:.200} is outside of {file.parent}: "
                "put the file with the tasks beside its checkouts"
            )
        instance["checkout"] = str(checkout)
    else:
        own = row.get("image") or row.get("docker_image")
        instance["image"] = own or _IMAGE.format(id=name.lower().replace("__", "_1776_"))
        if own is None:
            instance.setdefault("setup_command", _IMAGE_SETUP)
    repo = str(row.get("repo", "repository"))
    return Task.of(
        _PROMPT.format(repo=repo, issue=row["problem_statement"]),
        id=name,
        envs={"swe": {"instance": instance}},
        metadata={"subtask": repo, "patch": row.get("patch", "")},
    )


def load_instance(instance: Mapping[str, Any]) -> RepositoryTask:
    """The environment's data of a row."""
    patch = str(instance["test_patch"])
    command = str(instance.get("test_command") or TEST_COMMAND)
    tests = PytestTests(patch, command, str(instance.get("setup_command") or ""))
    wanted = (_names(instance["FAIL_TO_PASS"]), _names(instance["PASS_TO_PASS"]))
    if image := instance.get("image"):
        return RepositoryTask({}, tests, *wanted, image=str(image))
    files = _checkout(str(instance["checkout"]), str(instance.get("base_commit") or ""))
    return RepositoryTask(files, tests, *wanted)


def _names(given: Any) -> tuple[str, ...]:
    listed = json.loads(given) if isinstance(given, str) else given
    return tuple(str(name) for name in listed)


@lru_cache(maxsize=64)
def _checkout(folder: str, commit: str) -> Mapping[str, bytes]:
    """The files of a local repository: of a commit where it is a clone, else as they lie there."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"the checkout {folder} is no folder of this machine")
    if commit and (path / ".git").exists():
        if commit.startswith("-"):
            raise ConfigError(f"base_commit: {commit!r:.200} is no name of a commit")
        argv = ["git", "-C", folder, "archive", "--format=tar", commit]
        made = subprocess.run(argv, capture_output=True)
        if made.returncode != 0:
            raise ConfigError(f"{shlex.join(argv)}: {made.stderr.decode(errors='replace').strip()}")
        return unpacked(made.stdout)
    found = (file for file in path.rglob("*") if ".git" not in file.relative_to(path).parts)
    return {str(file.relative_to(path)): file.read_bytes() for file in found if file.is_file()}


@dataclass(frozen=True, slots=True)
class PytestTests:
    """Tests that a patch brings, run by pytest or by a command that reports as pytest does."""

    patch: str
    command: str
    setup: str = ""

    @property
    def files(self) -> list[str]:
        """Files that the patch writes."""
        return [name for name in dict.fromkeys(_HEADER.findall(self.patch)) if name != "/dev/null"]

    def protects(self, path: str, is_new: bool) -> bool:
        """Whether a file decides how tests run, so that the original one counts."""
        name = PurePosixPath(path)
        module = name.parent if name.name == "__init__.py" else name.with_suffix("")
        hides = str(module) in _OWN
        is_ours = path in self.files or name.name in _OBEYED or name.suffix == ".pth"
        return is_ours or (is_new and hides)

    async def run(self, session: Session, seconds: float) -> dict[str, bool]:
        applied = await session.run(["git", "apply", "--whitespace=nowarn", "-"], stdin=self.patch)
        if not applied.ok:
            raise RuntimeError(f"the test patch cannot be applied: {applied.text()[:500]}")
        tests = [name for name in self.files if name.endswith(".py")]
        command = f"{self.command} {shlex.join(tests)}"
        said = await session.shell(
            f"{self.setup} && {command}" if self.setup else command, wall_seconds=seconds
        )
        return read_report(said.stdout)


def read_report(output: str) -> dict[str, bool]:
    """Which tests passed, by pytest's short summary; a test that is named twice has to pass twice."""
    summary = output.rpartition("short test summary info")[2]
    passed: dict[str, bool] = {}
    for status, name in _STATUS.findall(summary):
        passed[name] = passed.get(name, True) and status in _PASSED
    return passed


async def base_commit(session: Session) -> str:
    """The commit that the repository of an image is at."""
    said = await session.run(["git", "-c", "safe.directory=*", "rev-parse", "HEAD"])
    commit = said.stdout.strip()
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise RuntimeError(f"the image's working directory is no git repository: {said.text()[:300]}")
    return commit


async def read_patch(session: Session, base: str) -> str:
    """The agent's changes in the repository of an image; `BadTree` where they cannot be read."""
    made = await session.run(["bash", "-c", _DIFF, "bash", base])
    try:
        data = await session.read("/tmp/.ludus-patch", max_bytes=MOST_TREE + 1)
    except OSError as error:
        raise BadTree(f"the changes could not be read: {error.strerror}") from None
    if not made.ok or len(data) > MOST_TREE:
        raise BadTree(f"the changes could not be read: {made.text()[-300:] or 'they are too large'}")
    return data.decode("utf-8", "surrogateescape")


def without_protected(patch: str, tests: PytestTests) -> str:
    """The patch without its changes of files that the tests protect."""
    kept = []
    for section in _SECTION.split(patch):
        match = _PATHS.search(section.partition("\n")[0])
        is_new = "\nnew file mode " in section[:2000]
        names: Sequence[str] = match.groups() if match else ()
        if match and not any(tests.protects(name, is_new) for name in names):
            kept.append(section)
    return "".join(kept)


async def apply_patch(session: Session, patch: str) -> bool:
    """Change the repository of a fresh container; whether that worked."""
    if not patch:
        return True
    await session.write("/tmp/.ludus-patch", patch.encode("utf-8", "surrogateescape"))
    done = await session.run(["git", "apply", "--whitespace=nowarn", "/tmp/.ludus-patch"])
    return done.ok
