"""The tasks of a large file of JSON lines: all rows are checked once, and each is parsed when it is asked for.

What is kept of a row is where it stands, 12 bytes, and while ids are compared 8 more. The file stays open: one
that is replaced goes on being read as it was, and one that is changed in its place is refused.
"""

from __future__ import annotations

import copy
import os
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

import numpy as np

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.user_files import decode_user_text, file_problem, parse_user_json

LARGE_BYTES = 16_000_000
"""Files up to this size are read at once."""
MOST_ROW_BYTES = 64_000_000
_BLOCK_BYTES = 4_000_000
ReadTask = Callable[[str, object], Task]
"""A task from where its row stands and what is there."""
CheckRow = Callable[[str, object], str]
"""Refuses a row that is no task; its id, empty where it has none."""


class _OpenFile:
    """A file that is read by place, by any thread; closed with its last user."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, size: int, start: int) -> bytes:
        return os.pread(self._descriptor, size, start)

    def state(self) -> tuple[int, int]:
        """Its size and when it was changed."""
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


def is_large(source: str) -> bool:
    """Whether a file's tasks are parsed as they are asked for."""
    path = Path(source)
    return file_problem(path) is None and path.stat().st_size > LARGE_BYTES


class TaskFile(Sequence[Task]):
    """The tasks of a file. Making it checks every row, as `load_tasks` does."""

    def __init__(self, source: str, read: ReadTask, check: CheckRow) -> None:
        self.source, self._read = source, read
        self._changes: tuple[Callable[[Task], Task], ...] = ()
        self._file = _OpenFile(source)
        self._stamp = self._file.state()
        self._starts, self._lines = array("Q"), array("I")
        names, has_names = array("q"), False
        for number, start, text in self._rows():
            where = f"{source}, line {number}"
            name = check(where, parse_user_json(text, f"{where},"))
            has_names = has_names or bool(name)
            names.append(hash(name or str(len(self._starts))))
            self._starts.append(start)
            self._lines.append(number)
        if not self._starts:
            raise ConfigError(f"{source} holds no tasks")
        if has_names:
            self._refuse_repeats(np.frombuffer(names, np.int64))

    def mapped(self, change: Callable[[Task], Task]) -> TaskFile:
        """These tasks, each changed when it is asked for."""
        other = copy.copy(self)
        other._changes = (*self._changes, change)
        return other

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> list[Task]: ...
    def __getitem__(self, place: int | slice) -> Task | list[Task]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        where = f"{self.source}, line {self._lines[place]}"
        task = self._read(where, parse_user_json(self._text(place), f"{where},"))
        task = task if task.id else replace(task, id=str(place))
        for change in self._changes:
            task = change(task)
        return task

    def _text(self, place: int) -> str:
        """A row as it stands in the file."""
        if self._file.state() != self._stamp:
            raise ConfigError(
                f"{self.source} was changed while its tasks are used: they are read when they are drawn. Write "
                "changed tasks to another file, and start the run again"
            )
        start = self._starts[place]
        size = (self._starts[place + 1] if place + 1 < len(self) else self._stamp[0]) - start
        line = self._file.read(size, start).partition(b"\n")[0]
        return decode_user_text(line, self.source, self._lines[place])

    def _rows(self) -> Iterator[tuple[int, int, str]]:
        """All rows with their line and where they begin; block by block, since a row alone takes longer."""
        number, start, rest = 1, 0, b""
        while block := self._file.read(_BLOCK_BYTES, start + len(rest)):
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if len(rest) > MOST_ROW_BYTES:
                line = number + whole.count(b"\n") + len(newline)
                raise ConfigError(
                    f"{self.source}, line {line}, has more than {MOST_ROW_BYTES:,} bytes: shorten the row, or "
                    "leave it out"
                )
            if newline:
                yield from self._lines_of(whole, number, start)
                number, start = number + whole.count(b"\n") + 1, start + len(whole) + 1
        yield from self._lines_of(rest, number, start)

    def _lines_of(self, block: bytes, number: int, start: int) -> Iterator[tuple[int, int, str]]:
        if not block:
            return
        block = block.removesuffix(b"\r")  # whose newline was cut off
        lines, texts = block.split(b"\n"), decode_user_text(block, self.source, number).split("\n")
        if len(lines) != len(texts):
            odd = next(place for place, data in enumerate(lines) if b"\r" in data.removesuffix(b"\r"))
            raise ConfigError(
                f"{self.source}, line {number + odd}, has a carriage return that ends no line: end every line "
                "by a newline"
            )
        for line, (data, text) in enumerate(zip(lines, texts, strict=True), start=number):
            if text.strip():
                yield line, start, text
            start += len(data) + 1

    def _refuse_repeats(self, hashes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        order = np.argsort(hashes, kind="stable")
        for place in np.flatnonzero(np.diff(hashes[order]) == 0):
            first, second = int(order[place]), int(order[place + 1])
            if (name := self[first].id) == self[second].id:
                places = [f"{self.source}, line {self._lines[one]}" for one in (first, second)]
                raise ConfigError(
                    f"two tasks have the id {name!r:.200}: {places[0]}, and {places[1]}; ids must be unique "
                    "within a task set"
                )


def map_tasks(change: Callable[[Task], Task], tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks, each changed."""
    return tasks.mapped(change) if isinstance(tasks, TaskFile) else [change(task) for task in tasks]
