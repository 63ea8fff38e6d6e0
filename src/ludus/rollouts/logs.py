"""Logs of language models as rows of data: of each conversation the longest log.

A row has `messages`, `tools` where the log has them, and `answer`, the text of the last reply. What is no
conversation to learn from is named and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from ludus.chat.api_fields import ApiError
from ludus.chat.chat_template import tools_key
from ludus.chat.logs import LoggedConversation, NotRead, form_of, is_log, log_entries
from ludus.core.failures import ConfigError
from ludus.core.messages import Json, parse_messages
from ludus.core.strict_json import BadJson, check_json
from ludus.core.user_files import file_problem, parse_user_json, read_user_text
from ludus.rollouts.message_tree import message_key

log = logging.getLogger(__name__)

_MOST_NAMED = 5
"""So many of the logs that cannot be read are named one by one."""
_ENDINGS = (".json", ".jsonl")
_ROWS = frozenset({"messages", "conversations", "prompt", "chosen"})
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
                found.calls.append((place, one, more))
            found.counts["spans and runs of other kinds than a model's call"] += before == len(
                found.calls
            )
            return
        if isinstance(entry, list) and _are_messages(entry):
            entry = {"messages": entry}
        if not isinstance(entry, Mapping) or not _ROWS & entry.keys():
            keys = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
            raise NotRead(f"it is in no form of logs that is known; it has: {keys:.200}")
        found.rows.append((place, entry))
    except (NotRead, ApiError) as error:
        found.problems.append(f"{place}: {error}")


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
