"""The bundled repositories: small Python packages with tests, and bugs that can be put into them.

A repository is one text file of sections, each of which starts with a line `@@ KIND NAME`:

    @@ file PATH        a file of the correct package
    @@ setup            examples that come before each test
    @@ test NAME        examples in the form of doctest
    @@ bug NAME         then `kind:`, `file:` and `fails:` (names of tests, divided by `;`)
    @@ correct          text of that file that occurs once, and in
    @@ broken           what stands there instead; there may be several such pairs
    @@ issue            the agent's task

The tests that a bug breaks are hidden (fail-to-pass); the others lie in the repository and are run again when
the work is scored (pass-to-pass).
"""

from __future__ import annotations

import doctest
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any, Protocol

from ludus.core.failures import ConfigError
from ludus.sandbox import Execution, Session, bundle, call

HELD_OUT = ("routes", "slugs", "versions")
"""Repositories of which no bug is trained on."""
_MARK = "@@ "


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a file that puts the bug in; the other way round it is the gold patch."""

    file: str
    correct: str
    broken: str


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug of a repository."""

    name: str
    kind: str
    edits: tuple[Edit, ...]
    fails: tuple[str, ...]
    issue: str


@dataclass(slots=True)
class Repository:
    """A correct package, its tests by name, and its bugs by name."""

    name: str
    files: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    tests: dict[str, str] = field(default_factory=dict)
    bugs: dict[str, Bug] = field(default_factory=dict)

    def with_bug(self, bug: Bug) -> dict[str, str]:
        """The files that the agent gets: the bug is in, and the tests that it breaks are not."""
        found = dict(self.files)
        for edit in bug.edits:
            if found[edit.file].count(edit.correct) != 1:
                raise ValueError(f"{self.name}, {bug.name}: the correct text is not there exactly once")
            found[edit.file] = found[edit.file].replace(edit.correct, edit.broken)
        shown = [
            f"{name}\n\n{self.setup}\n{text}"
            for name, text in self.tests.items()
            if name not in bug.fails
        ]
        return {**found, f"tests/{self.name}.txt": "\n\n".join(shown) + "\n"}


@cache
def repositories() -> Mapping[str, Repository]:
    """All that are bundled, by name."""
    folder = files("ludus.worlds.swe") / "repositories"
    texts = {one.name.removesuffix(".txt"): one for one in folder.iterdir() if one.name.endswith(".txt")}
    return {name: parse_repository(name, texts[name].read_text("utf-8")) for name in sorted(texts)}


def find_bug(repository: str, bug: str) -> tuple[Repository, Bug]:
    """A bug by the names of its repository and its own."""
    found = repositories().get(repository)
    if found is None or bug not in found.bugs:
        known = ", ".join(repositories() if found is None else found.bugs)
        what = f"repository {repository!r}" if found is None else f"bug {bug!r} in {repository}"
        raise ConfigError(f"the environment 'swe' has no {what}; there are: {known}")
    return found, found.bugs[bug]


def parse_repository(name: str, text: str) -> Repository:
    """A repository from its text; `ValueError` when the text is not of the form above."""
    made = Repository(name)
    sections = [part.partition("\n") for part in f"\n{text}".split(f"\n{_MARK}")[1:]]
    parsed = [(*head.partition(" ")[::2], body.rstrip("\n")) for head, _, body in sections]
    for number, (kind, title, body) in enumerate(parsed):
        if kind == "file":
            made.files[title] = body + "\n"
        elif kind == "setup":
            made.setup = body
        elif kind == "test":
            made.tests[title] = body
        elif kind == "bug":
            rest = [(k, b) for k, _, b in parsed[number + 1 :]]
            made.bugs[title] = _bug(title, dict(line.split(": ", 1) for line in body.splitlines()), rest)
        elif kind not in ("correct", "broken", "issue"):
            raise ValueError(f"{name}: a section {kind!r} is not known")
    return made


def _bug(name: str, fields: dict[str, str], sections: list[tuple[str, str]]) -> Bug:
    """A bug from its fields and the sections after it: pairs of texts, then the issue."""
    edits: list[Edit] = []
    while sections[0][0] == "correct":
        (_, correct), (_, broken), *sections = sections
        edits.append(Edit(fields["file"], correct, broken))
    kind, issue = sections[0]
    if kind != "issue" or not edits:
        raise ValueError(f"the bug {name!r} has no issue or no edit")
    return Bug(name, fields["kind"], tuple(edits), tuple(fields["fails"].split("; ")), issue)


_GUEST = "ludus.worlds.swe.guest_examples"
_TAR = ".ludus-tree.tar"
_OMIT = ("__pycache__", ".git", ".pytest_cache", _TAR)
_MOST_FILES = 5_000
_PARSER = doctest.DocTestParser()
_CHECKER = doctest.OutputChecker()
MOST_TREE = 16 << 20
"""Bytes of a tree, as an archive."""

Tree = Mapping[str, bytes]
"""Regular files by their path in the repository."""


class BadTree(ValueError):
    """The agent left files that cannot be scored: too many, or too large."""


class HiddenTests(Protocol):
    """Tests that say of each of their names whether it passes on a tree."""

    async def run(self, session: Session, seconds: float) -> dict[str, bool]:
        """Run in a session whose working directory is the repository; what is missing did not pass."""

    def protects(self, path: str, is_new: bool) -> bool:
        """Whether the agent's version of a file is not taken over, because it decides how tests run."""


@dataclass(frozen=True, slots=True)
class RepositoryTask:
    """The agent's start, and the tests that it does not see."""

    files: Tree
    tests: HiddenTests
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    image: str | None = None
    """Where the repository lies in an image, instead of files."""

    def taken_over(self, tree: Tree) -> dict[str, bytes]:
        """The submitted files, with the original ones where the tests protect them."""
        own = {
            path: body
            for path, body in tree.items()
            if not self.tests.protects(path, path not in self.files)
        }
        protected = {path: body for path, body in self.files.items() if self.tests.protects(path, False)}
        return own | protected


async def read_tree(session: Session) -> dict[str, bytes]:
    """The files of the agent's repository. `BadTree` where they cannot be had, which is the agent's doing."""
    omit = [f"--exclude={name}" for name in _OMIT]
    made = await session.run(["tar", *omit, "-cf", _TAR, "."])
    try:
        data = await session.read(_TAR, max_bytes=MOST_TREE + 1)
    except OSError as error:
        raise BadTree(f"the files could not be read: {error.strerror}; {made.text()[:200]}") from None
    if len(data) > MOST_TREE:
        raise BadTree(f"the repository is larger than {MOST_TREE >> 20} MB")
    return unpacked(data)


def unpacked(archive: bytes) -> dict[str, bytes]:
    """Regular files of an untrusted archive, without links, devices and paths that lead out."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if not member.isreg() or path.is_absolute() or ".." in path.parts:
                    continue
                body = tar.extractfile(member)
                found[str(path)] = body.read() if body is not None else b""
                if len(found) > _MOST_FILES:
                    raise BadTree(f"the repository has more than {_MOST_FILES:,} files")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BadTree(f"the files could not be read: {error}") from None
    return {name: body for name, body in found.items() if _is_text(name)}


def _is_text(name: str) -> bool:
    """Whether a name can be written again: it is UTF-8."""
    return name.isprintable() and not any("\ud800" <= char <= "\udfff" for char in name)


@dataclass(frozen=True, slots=True)
class ExampleTests:
    """Tests in doctest's form, by name; `setup` comes before each.

    Only their inputs reach the sandbox, and what they print is compared out here: code that ends the process,
    replaces modules or forges reports gains nothing, because it does not know what to say.
    """

    tests: Mapping[str, str]
    setup: str = ""

    def protects(self, path: str, is_new: bool) -> bool:
        return False

    async def run(self, session: Session, seconds: float) -> dict[str, bool]:
        examples = {
            name: _PARSER.get_examples(f"{self.setup}\n{text}\n") for name, text in self.tests.items()
        }
        sources = {name: [one.source for one in own] for name, own in examples.items()}
        program = bundle(_GUEST, then=call(_GUEST, "main"))
        asked = json.dumps({"seconds": max(1, int(seconds / 4)), "tests": sources})
        said = await session.run(["python3", "-I", "-c", program], stdin=asked, wall_seconds=seconds)
        reported = _reported(said)
        return {name: passes(own, reported.get(name)) for name, own in examples.items()}


def _reported(said: Execution) -> dict[str, Any]:
    try:
        found = json.loads(said.stdout)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def passes(examples: Sequence[doctest.Example], said: Any) -> bool:
    """Whether what was printed or raised is what the examples expect; `said` is from an untrusted process."""
    if not isinstance(said, list) or len(said) != len(examples):
        return False
    return all(_agrees(example, one) for example, one in zip(examples, said, strict=True))


def _agrees(example: doctest.Example, said: Any) -> bool:
    if not isinstance(said, list) or len(said) != 2 or not isinstance(said[0], str):
        return False
    printed, error = said
    if example.exc_msg is not None:
        return isinstance(error, str) and error == example.exc_msg.strip()
    flags = sum(flag for flag, on in example.options.items() if on)
    return error is None and _CHECKER.check_output(example.want, printed, flags)
