"""Scoring a tree: hidden tests run on it in a fresh session that the agent never touched.

The bundled tests are examples in doctest's form. Only their inputs reach the sandbox; what they print is
compared out here. So code that ends the process, replaces modules or forges reports gains nothing: it does not
know what to say.
"""

from __future__ import annotations

import doctest
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

from ludus.sandbox import Execution, Session, bundle, call

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
    """Tests in doctest's form, by name; `setup` comes before each."""

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
