"""Files of rows: large files of tasks as JSON lines (`TaskFile`), and logs of language models (`read_logs`).

Of a large file all rows are checked once, and each is parsed when it is asked for. What is kept of a row is
where it stands, 12 bytes, and while ids are compared 8 more. The file stays open: one that is replaced goes on
being read as it was, and one that is changed in its place is refused.

A row of logs is the longest log of a conversation: `messages`, `tools` where the log has them, and `answer`,
the text of the last reply. What is no conversation to learn from is named and counted.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, overload

import numpy as np

from ludus.chat.api_fields import ApiError
from ludus.chat.chat_template import tools_key
from ludus.chat.logs import LoggedConversation, NotRead, form_of, is_log, log_entries
from ludus.core.failures import ConfigError
from ludus.core.images import PARTS
from ludus.core.messages import Json, Message, parse_messages
from ludus.core.strict_json import BadJson, check_json
from ludus.core.task import Task
from ludus.core.user_files import decode_user_text, file_problem, parse_user_json, read_user_text
from ludus.rollouts.message_tree import message_key

MOST_CHARACTERS = 4_000_000
"""Most characters of a row's texts, about a million tokens."""
_TEXTS = ("prompt", "messages", "conversations", "completion", "chosen", "rejected")
"""Fields of a row that a model reads."""
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


def too_long(row: Any) -> str | None:
    """Which text of a row no context holds: tokenizers would work at it for minutes, and hear of no signal."""
    for name in _TEXTS if isinstance(row, Mapping) else ():
        if name in row and (size := _characters(row[name])) > MOST_CHARACTERS:
            return f"{name!r} has {size:,} characters, and may have {MOST_CHARACTERS:,}"
    return None


def _characters(value: Any) -> int:
    """Number of characters of all text in a value; images count as none."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if isinstance(value, Message):
        return len(value.content)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


log = logging.getLogger(__name__)

_MOST_NAMED = 5
"""So many of the logs that cannot be read are named one by one."""
_ENDINGS = (".json", ".jsonl")
ROWS = frozenset({"messages", "conversations", "prompt", "chosen"})
"""A table with one of these fields is a row of data, read as it is."""
_SAID = ("messages", "conversations", "tools", "functions")
"""Fields of a conversation that its task does not have."""
_DEPTH = 100
"""Levels of a log."""
_told: set[str] = set()
_FIRST_BYTES = 64_000_000
"""Where the first line of a large file ends at most."""
Place = str


@dataclass(slots=True)
class _Found:
    """What was found in logs."""

    rows: list[tuple[Place, Any]] = field(default_factory=list)
    """Rows of data, as they are."""
    calls: list[tuple[Place, LoggedConversation, Json]] = field(default_factory=list)
    """Conversations, with further fields of their rows."""
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def is_logs(source: str) -> bool:
    """Whether a source is a folder, or a file whose first row is a logged call."""
    path = Path(source)
    if path.suffix not in _ENDINGS:
        return path.suffix != ".parquet" and path.is_dir()  # that of a data set may be a folder
    if file_problem(path) is not None:
        return False
    try:
        if source.endswith(".json"):
            return any(is_log(value) for _, value in islice(_values(path, _Found()), 1))
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            first = next(
                (line for line in iter(lambda: lines.readline(_FIRST_BYTES), "") if line.strip()), ""
            )
        return is_log(parse_user_json(first, source))
    except ConfigError:
        return False  # reading its rows says what is wrong with them


def read_logs(source: str) -> list[tuple[Place, Any]]:
    """The rows of a folder of .json and .jsonl files, or of one file, each with its place."""
    path, found = Path(source), _Found()
    files = _files(path, found) if path.is_dir() else [path]
    for file in files:
        for place, value in _values(file, found):
            _read_value(place, value, found)
    kept = [*found.rows, *_longest(found)]
    _tell(source, len(files), len(kept), found)
    if not kept:
        why = f": {found.problems[0]}" if found.problems else ", such as requests with their responses"
        raise ConfigError(f"{source} holds no conversations that can be read{why} (docs/logs.md)")
    return kept


def opening_rows(rows: Iterable[tuple[Place, Any]]) -> Iterator[tuple[Place, Any]]:
    """Conversations as rows of tasks: what was asked before the first reply, each once."""
    seen: set[tuple[Any, ...]] = set()
    for place, row in rows:
        given = row.get("messages") or row.get("conversations") if isinstance(row, Mapping) else None
        if not isinstance(given, list):
            yield place, row
            continue
        try:
            asked = takewhile(lambda one: one.role != "assistant", parse_messages(given))
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from None
        messages = list(asked)
        if (key := tuple(map(message_key, messages))) not in seen:
            seen.add(key)
            rest = {name: value for name, value in row.items() if name not in _SAID}
            yield place, {**rest, "messages": messages}


def _files(folder: Path, found: _Found) -> list[Path]:
    there = sorted(one for one in folder.rglob("*") if not one.is_dir() and not one.name.startswith("."))
    files = [one for one in there if one.suffix in _ENDINGS]
    if not files:
        raise ConfigError(f"the folder {folder} holds no .json or .jsonl files")
    others = Counter(one.suffix or one.name for one in there if one.suffix not in _ENDINGS)
    found.counts.update({f"files {name}, which hold no logs": count for name, count in others.items()})
    return files


def _values(path: Path, found: _Found) -> Iterator[tuple[Place, Any]]:
    """The values of a file: of a JSON file one or the entries of its list, else one of each line."""
    try:
        text = read_user_text(path)
    except ConfigError as error:
        found.problems.append(str(error))
        return
    if path.suffix == ".json":
        try:
            value = parse_user_json(text, str(path))
        except ConfigError as error:
            first = text.lstrip().partition("\n")
            if not (
                first[2].strip() and _is_json(first[0])
            ):  # exporters write lines into .json files, too
                found.problems.append(str(error))
                return
        else:
            is_one = not isinstance(value, list) or _are_messages(value)
            values = [value] if is_one else value
            yield from (
                (str(path) if is_one else f"{path}, row {n}", one) for n, one in enumerate(values, 1)
            )
            return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, parse_user_json(line, f"{where},")
            except ConfigError as error:
                found.problems.append(str(error))


def _is_json(text: str) -> bool:
    try:
        parse_user_json(text, "")
    except ConfigError:
        return False
    return True


def _are_messages(value: list[Any]) -> bool:
    return bool(value) and all(
        isinstance(one, Mapping) and {"role", "from"} & one.keys() for one in value
    )


def _read_value(place: Place, value: Any, found: _Found) -> None:
    try:
        check_json(value, depth=_DEPTH)
        for inner, entry in log_entries(value):
            _read(f"{place}{inner}", entry, found)
    except (NotRead, BadJson) as error:
        found.problems.append(f"{place}: {error}")


def _read(place: Place, entry: Any, found: _Found) -> None:
    """Sort an entry: conversations, a row of data, or what is neither."""
    try:
        if (form := form_of(entry)) is not None:
            more = {"target": entry["target"]} if "target" in entry else {}
            before = len(found.calls)
            for one in form(entry):
                _check_row(_row(one, more))
                found.calls.append((place, one, more))
            found.counts["spans and runs of other kinds than a model's call"] += before == len(
                found.calls
            )
            return
        if isinstance(entry, list) and _are_messages(entry):
            entry = {"messages": entry}
        if not isinstance(entry, Mapping) or not ROWS & entry.keys():
            keys = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
            raise NotRead(f"it is in no form of logs that is known; it has: {keys:.200}")
        _check_row(entry)
        found.rows.append((place, entry))
    except (NotRead, ApiError) as error:
        found.problems.append(f"{place}: {error}")


def _check_row(row: Mapping[str, Any]) -> None:
    """Leave out what would be refused as a row: one entry must not refuse a folder."""
    if (problem := too_long(row)) is not None:
        raise NotRead(problem)
    said = next((row[name] for name in ("messages", "conversations") if row.get(name) is not None), None)
    if said is None:
        return
    try:
        messages = parse_messages(
            [_without_images(one) for one in said] if isinstance(said, list) else said
        )
    except ValueError as error:
        raise NotRead(str(error)) from None
    if not messages:
        raise NotRead("it has no messages")
    if messages[0].role == "assistant" and not row.get("system"):
        raise NotRead("the assistant speaks first: the messages of the request are missing, or no list")


def _without_images(message: Any) -> Any:
    """The message with a text for each image, which is read later."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = [
        {"type": "text", "text": ""} if isinstance(one, Mapping) and one.get("type") in PARTS else one
        for one in message["content"]
    ]
    return {**message, "content": parts}


def _longest(found: _Found) -> list[tuple[Place, Json]]:
    """The conversations that no other goes on with: each request repeats those before it."""
    called = {one.trace for _, one, _ in found.calls if one.is_call}
    calls = [
        each
        for each in found.calls
        if each[1].is_call or not each[1].trace or each[1].trace not in called
    ]
    known: set[tuple[Any, ...]] = set()
    kept: list[int] = []
    for number in sorted(range(len(calls)), key=lambda n: -len(calls[n][1].messages)):
        one = calls[number][1]
        chain: tuple[Any, ...] = (tools_key(one.tools or ()),)
        chains = [chain := (hash(chain), message_key(message)) for message in one.messages]
        if chains[-1] not in known:
            kept.append(number)
        known.update(chains)
    found.counts["logs whose conversation another goes on with"] = len(calls) - len(kept)
    found.counts["logs of agents whose models' calls are logged too"] = len(found.calls) - len(calls)
    found.counts["replies whose thoughts are left out"] = sum(calls[n][1].has_thought for n in kept)
    return [(calls[n][0], _row(calls[n][1], calls[n][2])) for n in sorted(kept)]


def _row(one: LoggedConversation, more: Json) -> Json:
    row = {"messages": list(one.messages), "answer": one.messages[-1].content, **more}
    return row if one.tools is None else row | {"tools": [tool.as_openai() for tool in one.tools]}


def _tell(source: str, files: int, kept: int, found: _Found) -> None:
    """What was read and what was not; said once, because a run reads its data several times."""
    counted = "".join(f"; {count} {what}" for what, count in found.counts.items() if count)
    said = f"{source}: {kept} conversations in {files} file(s){counted}"
    if said in _told:
        return
    _told.add(said)
    log.info("%s", said)
    if found.problems:
        named, more = found.problems[:_MOST_NAMED], len(found.problems) - _MOST_NAMED
        named += [f"and {more} more"] if more > 0 else []
        count = len(found.problems)
        log.warning(
            "%s: %d logs cannot be read, and are left out:\n  %s", source, count, "\n  ".join(named)
        )
