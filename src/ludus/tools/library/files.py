"""Looking at files and changing them, as software-engineering agents do: four small tools, so that each schema
tells a model what is required."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePosixPath

from ludus.core.config import Config
from ludus.core.failures import InfraError, ToolFault
from ludus.core.messages import ToolContext, ToolResult
from ludus.sandbox import Session
from ludus.tools.library import Toolkit
from ludus.tools.library.sandbox import SandboxTool, SessionLease

_MOST_BYTES = 1_000_000
_MOST_LINES = 500
_MOST_ENTRIES = 200
_CONTEXT_LINES = 4
_ENTRY = re.compile(r"(\S) ([0-9]{1,20}) (.+)", re.DOTALL)
"""A line of `find`'s output: kind, size and name of a file."""
_WITH_ENDS = re.compile(r"[^\n]*\n|[^\n]+")


class FileTool(SandboxTool):
    """Base of the file tools: a session, and file errors in words for the model."""

    @asynccontextmanager
    async def _lease(self, path: str, context: ToolContext) -> AsyncIterator[SessionLease]:
        if not path or "\0" in path:
            raise ToolFault("the path is empty or holds a NUL character")
        async with self.sessions.use(context) as lease:
            try:
                yield lease
            except InfraError:
                raise
            except OSError as error:
                reason = error.strerror or str(error) or type(error).__name__
                raise ToolFault(f"{path[:200]}: {reason}") from None


class ViewFile(FileTool):
    """Show a file with line numbers, or list a folder, two levels deep.

    Args:
        path: The file or folder; relative paths start at the working directory.
        first: The first line to show.
        last: The last line to show; -1 is the end of the file.
    """

    name = "view_file"

    async def run(self, path: str, context: ToolContext, first: int = 1, last: int = -1) -> ToolResult:
        async with self._lease(path, context) as lease:
            try:
                data = await lease.session.read(path, max_bytes=_MOST_BYTES + 1)
            except IsADirectoryError:
                return ToolResult(lease.with_note(await _listing(lease.session, path)))
        if len(data) > _MOST_BYTES or b"\0" in data:
            what = "binary" if b"\0" in data else f"larger than {_MOST_BYTES:,} bytes"
            raise ToolFault(f"{path} is {what}; look at it with another tool")
        text = data.decode("utf-8", "backslashreplace")
        return ToolResult(lease.with_note(numbered(text, first, last)))


class CreateFile(FileTool):
    """Write a file. One that is there already is replaced; missing folders are made.

    Args:
        path: Where to write it.
        text: All of its contents.
    """

    name = "create_file"

    async def run(self, path: str, text: str, context: ToolContext) -> ToolResult:
        async with self._lease(path, context) as lease:
            await _write(lease.session, path, text)
        return ToolResult(lease.with_note(f"wrote {path} ({len(_lines(text))} lines)"))


class ReplaceInFile(FileTool):
    """Replace one piece of text in a file. The old text must occur exactly once, white space included.

    Args:
        path: The file to change.
        old: The text to replace, with enough around it to be unique.
        new: What comes in its place; empty to delete.
    """

    name = "replace_in_file"

    async def run(self, path: str, old: str, new: str, context: ToolContext) -> ToolResult:
        async with self._lease(path, context) as lease:
            text = await _text(lease.session, path)
            start = _only(text, old, path)
            changed = text[:start] + new + text[start + len(old) :]
            await _write(lease.session, path, changed)
        line = text.count("\n", 0, start) + 1
        return ToolResult(lease.with_note(_around(changed, path, line, new)))


class InsertInFile(FileTool):
    """Insert lines into a file, after a line of the given number.

    Args:
        path: The file to change.
        line: The line to insert after; 0 inserts at the beginning.
        text: The lines to insert.
    """

    name = "insert_in_file"

    async def run(self, path: str, line: int, text: str, context: ToolContext) -> ToolResult:
        async with self._lease(path, context) as lease:
            lines = _WITH_ENDS.findall(await _text(lease.session, path))
            if not 0 <= line <= len(lines):
                raise ToolFault(
                    f"{path} has {len(lines)} lines; line can be 0 to {len(lines)}, not {line}"
                )
            if line and not lines[line - 1].endswith("\n"):
                lines[line - 1] += "\n"
            inserted = text if text.endswith("\n") or line == len(lines) else text + "\n"
            changed = "".join([*lines[:line], inserted, *lines[line:]])
            await _write(lease.session, path, changed)
        return ToolResult(lease.with_note(_around(changed, path, line + 1, text)))


def numbered(text: str, first: int, last: int) -> str:
    """The lines from `first` to `last` with their numbers; `ToolFault` when there are none."""
    lines = _lines(text)
    end = len(lines) if last == -1 else last
    if not lines:
        return "(the file is empty)"
    if first < 1 or end < first or first > len(lines):
        raise ToolFault(f"the file has {len(lines)} lines; {first} to {last} is no range of them")
    end = min(end, len(lines))
    shown = lines[first - 1 : min(end, first - 1 + _MOST_LINES)]
    rows = [f"{number:6}\t{line}" for number, line in enumerate(shown, first)]
    if len(shown) < end - first + 1:
        rows.append(
            f"... {end - first + 1 - len(shown)} more lines, up to {end}; ask for them by first and last"
        )
    return "\n".join(rows)


def _lines(text: str) -> list[str]:
    """Lines as an editor counts them: by newlines only."""
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _only(text: str, old: str, path: str) -> int:
    """Where `old` is, if it is there once."""
    if not old:
        raise ToolFault("old is empty; use insert_in_file to add lines")
    places: list[int] = []
    start = text.find(old)
    while start >= 0 and len(places) < 1_000:
        places.append(start)
        start = text.find(old, start + 1)
    if len(places) == 1:
        return places[0]
    if not places:
        hint = _hint(text, old)
        raise ToolFault(f"old does not occur in {path}: nothing was changed.{hint}")
    lines = [str(text.count("\n", 0, start) + 1) for start in places[:20]]
    more = ", ..." if len(places) > 20 else ""
    raise ToolFault(
        f"old occurs {len(places)} times in {path}, on lines {', '.join(lines)}{more}: nothing was changed. "
        "Give more of the text around it"
    )


def _hint(text: str, old: str) -> str:
    """Where `old` would be if white space did not matter."""
    wanted = " ".join(old.split())
    first = " ".join(old.strip("\n").split("\n")[0].split())
    if not wanted or not first:
        return ""
    for number, line in enumerate(_lines(text), 1):
        if first == " ".join(line.split()):
            return f" Line {number} is the same but for white space"
    return ""


def _around(text: str, path: str, line: int, written: str) -> str:
    lines = _lines(text)
    last = min(len(lines), line + max(0, len(_lines(written)) - 1) + _CONTEXT_LINES)
    first = max(1, line - _CONTEXT_LINES)
    if not lines or first > last:
        return f"{path} was changed; it is now empty"
    return f"{path} was changed:\n{numbered(text, first, last)}"


async def _text(session: Session, path: str) -> str:
    data = await session.read(path, max_bytes=_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ToolFault(f"{path} is larger than {_MOST_BYTES:,} bytes; change it with another tool")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ToolFault(f"{path} is not UTF-8 text; change it with another tool") from None


async def _write(session: Session, path: str, text: str) -> None:
    data = text.encode("utf-8", "replace")
    if len(data) > _MOST_BYTES:
        raise ToolFault(f"the text is larger than {_MOST_BYTES:,} bytes")
    try:
        await session.write(path, data)
    except FileNotFoundError:
        await session.run(["mkdir", "-p", "--", str(PurePosixPath(path).parent)])
        await session.write(path, data)


async def _listing(session: Session, path: str) -> str:
    start = path if path.startswith("/") else f"./{path}"  # never an option of the command
    depth = ["-mindepth", "1", "-maxdepth", "2"]
    names = await session.run(
        ["find", start, *depth, "-name", ".*", "-prune", "-o", "-printf", "%y %s %P\\0"]
    )
    # By a pattern: the output is cut where a folder is huge, and the session may have another `find`.
    entries = [found.groups() for found in map(_ENTRY.fullmatch, names.stdout.split("\0")) if found]
    rows = [
        f"{name}/"
        if kind == "d"
        else f"{name} ({int(size):,} bytes)"
        if kind == "f"
        else f"{name} ({kind})"
        for kind, size, name in sorted(entries, key=lambda entry: entry[2])
    ]
    if not rows:
        return f"{path} is an empty folder"
    more = [f"... {len(rows) - _MOST_ENTRIES} more"] if len(rows) > _MOST_ENTRIES else []
    return "\n".join([f"{path}:", *rows[:_MOST_ENTRIES], *more])


class FileOptions(Config):
    """Options of `files`."""

    max_chars: int = 20_000
    """How much of a file the model reads at once."""


FILES = Toolkit(
    FileOptions,
    lambda options, sessions: [
        kind(sessions, max_chars=options.max_chars)
        for kind in (ViewFile, CreateFile, ReplaceInFile, InsertInFile)
    ],
)
