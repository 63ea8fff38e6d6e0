"""All episodes as one DuckDB table, filled from the Parquet files of the runs; filters, sorting, paging.

The table has one narrow row for each of their rows: what people filter and sort by, and the text that they
search. It is in a temporary folder, and gone with the server. `sync` reads what is new, the newest steps
first, a few files at a time. One thread syncs; every query has a cursor of its own. A file that cannot be read
is shown as a problem, and tried again when it changes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.core.failures import LudusError, MissingExtraError
from ludus.core.messages import Json
from ludus.observe import TrajectoryFile
from ludus.remote.processes import ScratchFolder
from ludus.viewer.workspace import NotFound, Workspace

if TYPE_CHECKING:
    import duckdb

_FILES_AT_ONCE = 16
_BYTES_AT_ONCE = 64_000_000
_MOST_TEXT = 16_000
"""Characters of an episode's text that can be searched: a half from its beginning, a half from its end."""
_MOST_MESSAGE_TEXT = 6_000
MOST_ROWS = 200
"""Episodes on a page."""
_MOST_FACETS = 300

Key = tuple[str, str]
"""A run's name and a file's."""

_COLUMNS = """
    run VARCHAR, file VARCHAR, row INTEGER, step BIGINT, split VARCHAR, grp INTEGER, attempt INTEGER,
    task VARCHAR, stop VARCHAR, failure VARCHAR, failure_kind VARCHAR, failure_message VARCHAR,
    reward DOUBLE, success BOOLEAN, parts VARCHAR, turns INTEGER, tokens INTEGER, action_tokens INTEGER,
    tools VARCHAR[], faults VARCHAR[], faulted VARCHAR[], answer VARCHAR, target VARCHAR, opening VARCHAR,
    seconds DOUBLE, advantage DOUBLE, branch INTEGER, version BIGINT
"""
_SUCCESS = """
    CASE WHEN reward IS NULL OR stop IN ('failed', 'aborted') THEN NULL
         WHEN len(list_filter(rewards, lambda r: r.name = 'success')) > 0
         THEN list_filter(rewards, lambda r: r.name = 'success')[1].value >= 1 - 1e-9
         ELSE reward >= 1 - 1e-9 END
"""
_READ = f"""
    SELECT ? AS run, parse_filename(filename) AS file, file_row_number::INTEGER AS row,
        step, split, group_id AS grp, attempt,
        left(task_id, 500) AS task, stop, failure_boundary AS failure, failure_kind,
        left(failure_message, 500) AS failure_message,
        CASE WHEN isfinite(reward) THEN reward END AS reward, {_SUCCESS} AS success,
        left(to_json(list_transform(rewards, lambda r: {{'n': left(r.name, 80), 'v': r.value}})), 4000)
            AS parts,
        turns, len(tokens)::INTEGER AS tokens,
        len(list_filter(action_mask, lambda m: m))::INTEGER AS action_tokens,
        list_filter(list_distinct(list_transform(flatten(list_transform(segments,
            lambda s: coalesce(json_extract_string(s.calls, '$[*].name'), []))),
            lambda n: left(n, 200))), lambda n: n <> '')[:50] AS tools,
        flatten(list_transform(segments, lambda s: coalesce(s.faults, [])))[:200] AS faults,
        list_transform(flatten(list_transform(segments, lambda s: coalesce(s.faulted, []))),
            lambda n: left(n, 200))[:200] AS faulted,
        left(answer, 300) AS answer, left(target, 300) AS target,
        left(list_filter(prompt, lambda m: m.role = 'user')[1].content, 300) AS opening,
        list_filter(seconds, lambda s: s.name = 'total')[1].value AS seconds,
        __ADVANTAGE__ AS advantage, __BRANCH__ AS branch,
        list_max(flatten(list_transform(segments,
            lambda s: list_transform(coalesce(s.versions, []), lambda v: v.version)))) AS version,
        array_to_string(list_transform(messages, lambda m:
            left(coalesce(m.content, ''), {_MOST_MESSAGE_TEXT}) || ' '
            || left(coalesce(m.tool_calls, ''), {_MOST_MESSAGE_TEXT})), chr(10)) AS whole
    FROM read_parquet(?, filename=true, file_row_number=true, union_by_name=true, hive_partitioning=false)
"""
_INSERT = f"""
    WITH found AS ({_READ}), short AS (SELECT * EXCLUDE (whole),
        CASE WHEN length(whole) <= {_MOST_TEXT} THEN whole
             ELSE left(whole, {_MOST_TEXT // 2}) || ' … ' || right(whole, {_MOST_TEXT // 2}) END AS spoken
    FROM found)
    SELECT *, lower(spoken) AS text FROM short
"""
_NEWER = {
    "__ADVANTAGE__": ("list_avg(list_filter(advantages, lambda a: a IS NOT NULL))", "NULL::DOUBLE"),
    "__BRANCH__": ("branch_attempt", "NULL::INTEGER"),
}
"""Columns that older files lack, and what stands for them there."""

_SUMMARIES = {
    "episodes": "count(*)", "reward": "avg(reward)", "success": "avg(success::INTEGER)",
    "lost": "count(failure)", "tasks": "count(DISTINCT task)", "turns": "avg(turns)",
    "action_tokens": "avg(action_tokens)",
}  # fmt: skip
_SUMMARY = ", ".join(f"{value} AS all_{name}" for name, value in _SUMMARIES.items())

SORTS = {
    "step": "step", "reward": "reward", "turns": "turns", "tokens": "action_tokens", "seconds": "seconds",
    "task": "task", "advantage": "advantage", "version": "version",
}  # fmt: skip
"""Sort keys of episodes, and their columns."""


class FilterError(LudusError):
    """A filter that makes no sense."""


@dataclass(frozen=True, slots=True)
class EpisodeQuery:
    """Which episodes, in which order; None and empty leave a thing open."""

    runs: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    split: str | None = None
    task: str | None = None
    """An id, a pattern (*), or a part of an id."""
    least_reward: float | None = None
    most_reward: float | None = None
    success: bool | None = None
    stop: str | None = None
    failure: str | None = None
    """A boundary, or "any"."""
    tool: str | None = None
    fault: str | None = None
    """A kind of fault, or "any"."""
    faulted: str | None = None
    """A tool whose call was answered by a fault."""
    text: str | None = None
    answer: str | None = None
    group: int | None = None
    file: str | None = None
    sort: str = "step"
    ascending: bool = False
    offset: int = 0
    limit: int = 50

    def where(self) -> tuple[str, list[Any]]:
        tests: list[str] = []
        values: list[Any] = []

        def add(test: str, *given: Any) -> None:
            tests.append(test)
            values.extend(given)

        if self.runs:
            add("list_contains(?, run)", list(self.runs))
        equal = {"split": self.split, "stop": self.stop, "grp": self.group, "file": self.file}
        for column, value in equal.items():
            if value is not None:
                add(f"{column} = ?", value)
        bounds = (
            ("step >= ?", self.first_step),
            ("step <= ?", self.last_step),
            ("reward >= ?", self.least_reward),
            ("reward <= ?", self.most_reward),
            ("success = ?", self.success),
        )
        for test, number in bounds:
            if number is not None:
                add(test, number)
        if self.task is not None:
            if "*" in self.task:
                add("task GLOB ?", self.task)
            else:
                add("(task = ? OR contains(task, ?))", self.task, self.task)
        if self.failure == "any":
            add("failure IS NOT NULL")
        elif self.failure is not None:
            add("failure = ?", self.failure)
        if self.fault == "any":
            add("len(faults) > 0")
        for column, wanted in (
            ("tools", self.tool),
            ("faults", self.fault if self.fault != "any" else None),
            ("faulted", self.faulted),
        ):
            if wanted is not None:
                add(f"list_contains({column}, ?)", wanted)
        if self.answer is not None:
            add("answer = ?", self.answer)
        if self.text:
            add("contains(text, ?)", self.text.lower())
        return " AND ".join(tests) or "true", values

    def order(self) -> str:
        if self.sort not in SORTS:
            raise FilterError(f"episodes are sorted by {', '.join(SORTS)}, not by {self.sort!r}")
        way = "ASC" if self.ascending else "DESC"
        return f"{SORTS[self.sort]} {way} NULLS LAST, step DESC, run, file, row"


@dataclass(slots=True)
class IndexState:
    """How far the table is."""

    version: int = 0
    """Counts changes of the table."""
    files: int = 0
    waiting: int = 0
    """Files that have not been read yet."""
    problems: dict[Key, str] = field(default_factory=dict)
    """The errors of files that cannot be read."""


class EpisodeIndex:
    """The table. `sync` may run in one thread while others query."""

    def __init__(self, workspace: Workspace) -> None:
        try:
            import duckdb
        except ImportError:
            raise MissingExtraError("duckdb", "view", "the viewer") from None
        self._errors = (duckdb.Error,)
        self._workspace = workspace
        self._scratch = ScratchFolder("ludus-view-")
        folder = self._scratch.path
        settings = {
            "memory_limit": "512MB",
            "threads": 2,
            "temp_directory": str(folder / "spill"),
            "autoinstall_known_extensions": False,  # nothing is loaded from outside
            "autoload_known_extensions": False,
            "preserve_insertion_order": False,
        }
        self._database = duckdb.connect(str(folder / "episodes.duckdb"), config=settings)
        self._database.execute(f"CREATE TABLE episodes ({_COLUMNS}, spoken VARCHAR, text VARCHAR)")
        self._known: dict[Key, tuple[int, int]] = {}
        self._syncing = threading.Lock()
        self.state = IndexState()

    def close(self) -> None:
        with suppress(*self._errors):
            self._database.close()
        self._scratch.remove()

    # What is new.

    def sync(self) -> bool:
        """Read a few new files and drop what is gone; whether there is more to do."""
        with self._syncing:
            there = self._files()
            gone = [key for key in self._known if key not in there]
            changed = [key for key, (_, stamp) in there.items() if self._known.get(key) != stamp]
            for key in gone:
                self.state.problems.pop(key, None)
            self._forget([*gone, *(key for key in changed if key in self._known)])
            changed.sort(key=lambda key: (there[key][0].step, key), reverse=True)
            batch = self._batch(changed, there)
            if batch:
                self._read(batch, there)
            self.state.files = len(there)
            self.state.waiting = len(changed) - len(batch)
            return self.state.waiting > 0

    def _files(self) -> dict[Key, tuple[TrajectoryFile, tuple[int, int]]]:
        found: dict[Key, tuple[TrajectoryFile, tuple[int, int]]] = {}
        for name, run in self._workspace.runs().items():
            for file in self._workspace.files(run):
                with suppress(OSError):
                    status = file.path.stat()
                    found[name, file.path.name] = (file, (status.st_mtime_ns, status.st_size))
        return found

    def _batch(
        self, changed: Sequence[Key], there: Mapping[Key, tuple[TrajectoryFile, tuple[int, int]]]
    ) -> list[Key]:
        """The first of these, of one run, that are read together; the very first alone, to be quick."""
        if not changed:
            return []
        most = _FILES_AT_ONCE if self._known else 1
        size = 0
        batch: list[Key] = []
        for key in (key for key in changed if key[0] == changed[0][0]):
            if len(batch) == most or (batch and size > _BYTES_AT_ONCE):
                break
            batch.append(key)
            size += there[key][1][1]
        return batch

    def _read(
        self, batch: Sequence[Key], there: Mapping[Key, tuple[TrajectoryFile, tuple[int, int]]]
    ) -> None:
        paths = [_literal(there[key][0].path) for key in batch]
        error = self._insert(batch[0][0], paths)
        if error and len(batch) > 1:
            for key in batch:
                self._read([key], there)
            return
        for key in batch:
            self._known[key] = there[key][1]
            self.state.problems.pop(key, None)
            if error:
                self.state.problems[key] = error
        self.state.version += 1

    def _insert(self, run: str, paths: list[str]) -> str:
        """Read files into the table; returns their errors, empty if there are none."""
        error = ""
        for place in (0, 1):  # older files lack some columns
            sql = _INSERT
            for name, columns in _NEWER.items():
                sql = sql.replace(name, columns[place])
            try:
                with self._database.cursor() as cursor:
                    cursor.execute(f"INSERT INTO episodes {sql}", [run, paths])
                return ""
            except self._errors as problem:
                error = " ".join(str(problem).split())[:300]
        return error

    def _forget(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        with self._database.cursor() as cursor:
            for run, file in keys:
                cursor.execute("DELETE FROM episodes WHERE run = ? AND file = ?", [run, file])
                del self._known[run, file]
        self.state.version += 1

    # What is asked.

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Json]:
        """The result of a query as rows by name; a cursor of its own."""
        try:
            with self._database.cursor() as cursor:
                return _fetched(cursor, sql, values)
        except self._errors as error:
            raise FilterError(" ".join(str(error).split())[:300]) from None

    def page(self, query: EpisodeQuery) -> tuple[list[Json], Json]:
        """A page of episodes without their texts, and what all that fit the query have in common.

        One scan finds them, whose result is narrow; the wide columns are read for the rows of the page alone.
        """
        where, values = query.where()
        limit, offset = max(0, min(query.limit, MOST_ROWS)), max(0, query.offset)
        found, needle = "NULL AS found", []
        if query.text:  # what stands around the place where the text was found
            found = "substr(spoken, greatest(1, strpos(text, ?) - 60), 200) AS found"
            needle = [query.text.lower()]
        rows = self.rows(
            f"WITH hit AS MATERIALIZED (SELECT rowid AS id, run, file, row, step, reward, success, failure, "
            f"task, turns, action_tokens, seconds, advantage, version FROM episodes WHERE {where}), "
            f"page AS MATERIALIZED (SELECT id, row_number() OVER () AS place FROM "
            f"(SELECT id FROM hit ORDER BY {query.order()} LIMIT {limit} OFFSET {offset})), "
            f"shown AS (SELECT place, * EXCLUDE (spoken, text, id, place), {found} FROM page "
            f"JOIN episodes ON rowid = id), "
            f"total AS (SELECT {_SUMMARY} FROM hit) "
            f"SELECT total.*, shown.* FROM total LEFT JOIN shown ON true ORDER BY place",
            [*values, *needle],
        )
        summary = {name: rows[0][f"all_{name}"] for name in _SUMMARIES}
        for row in rows:
            for name in (*(f"all_{name}" for name in _SUMMARIES), "place"):
                del row[name]
        return [row for row in rows if row["run"] is not None], summary

    def neighbours(self, query: EpisodeQuery, run: str, file: str, row: int) -> Json:
        """The episodes before and after one in the list of a query, its place there, and how many there are.

        Nothing where it is not in that list, as when a filter went by what has changed since.
        """
        where, values = query.where()
        found = self.rows(
            "WITH hit AS (SELECT *, {'run': run, 'file': file, 'row': row} AS own FROM episodes "
            f"WHERE {where}), near AS (SELECT own, row_number() OVER listed AS place, "
            "count(*) OVER () AS episodes, lag(own) OVER listed AS previous, lead(own) OVER listed AS next "
            f"FROM hit WINDOW listed AS (ORDER BY {query.order()})) SELECT * EXCLUDE (own) FROM near "
            "WHERE own.run = ? AND own.file = ? AND own.row = ?",
            [*values, run, file, row],
        )
        return found[0] if found else {}

    def facets(self, runs: Sequence[str] = ()) -> Json:
        """The values that there are to filter by, the most frequent first."""
        where, values = EpisodeQuery(runs=tuple(runs)).where()
        found: Json = {}
        for name, column in (("stop", "stop"), ("split", "split"), ("failure", "failure")):
            found[name] = self.rows(
                f"SELECT {column} AS value, count(*) AS episodes FROM episodes WHERE {where} "
                f"AND {column} IS NOT NULL GROUP BY ALL ORDER BY 2 DESC, 1 LIMIT {_MOST_FACETS}",
                values,
            )
        for name, column in (("tool", "tools"), ("fault", "faults")):
            found[name] = self.rows(
                f"SELECT value, count(*) AS episodes FROM (SELECT unnest(list_distinct({column})) AS value "
                f"FROM episodes WHERE {where}) GROUP BY ALL ORDER BY 2 DESC, 1 LIMIT {_MOST_FACETS}",
                values,
            )
        [ends] = self.rows(
            "SELECT min(step) AS first_step, max(step) AS last_step, min(reward) AS least_reward, "
            f"max(reward) AS most_reward FROM episodes WHERE {where}",
            values,
        )
        return found | ends

    def group(self, run: str, file: str, group: int) -> list[Json]:
        return self.rows(
            "SELECT * EXCLUDE (spoken, text) FROM episodes WHERE run = ? AND file = ? AND grp = ? ORDER BY row "
            f"LIMIT {MOST_ROWS}",
            [run, file, group],
        )

    def stored_row(self, run: str, file: str, row: int) -> tuple[Json, list[Json]]:
        """A row as its file holds it, and those of its group that stand before it where it is a branch."""
        path = _literal(self._workspace.file(run, file))
        source = "FROM read_parquet(?, file_row_number=true, hive_partitioning=false)"
        found = self._stored(f"SELECT * {source} WHERE file_row_number = ?", [path, row], file)
        if not found:
            raise NotFound(f"{file} of {run!r} has no episode {row}")
        if found[0].get("branch_attempt") is None:
            return found[0], []
        before = self._stored(
            f"SELECT * {source} WHERE group_id = ? AND file_row_number < ? ORDER BY file_row_number",
            [path, found[0]["group_id"], row],
            file,
        )
        return found[0], before

    def _stored(self, sql: str, values: Sequence[Any], file: str) -> list[Json]:
        try:
            with self._database.cursor() as cursor:
                return _fetched(cursor, sql, values)
        except self._errors as error:
            text = " ".join(str(error).split())[:300]
            raise NotFound(f"{file} cannot be read: {text}") from None


def _literal(path: Path) -> str:
    """A path as DuckDB reads this file and no other: it takes paths for patterns."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in str(path))


def _fetched(cursor: duckdb.DuckDBPyConnection, sql: str, values: Sequence[Any]) -> list[Json]:
    cursor.execute(sql, list(values))
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
