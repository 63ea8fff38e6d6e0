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

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from ludus.core.failures import ConfigError

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
