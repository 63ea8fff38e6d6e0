"""The engines of SQL: SQLite with an authorizer and limits; DuckDB without files, extensions or the network."""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote

from ludus.sandbox.guest.sql_entry import DatabaseUnusable, Json, Refused, database_path

_LONGEST_VALUE = 10_000_000
_READING_PRAGMAS = frozenset(
    [
        "table_info",
        "table_xinfo",
        "table_list",
        "index_list",
        "index_info",
        "index_xinfo",
        "foreign_key_list",
        "database_list",
        "function_list",
        "collation_list",
        "compile_options",
    ]
)
_READING = frozenset(
    {
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
        sqlite3.SQLITE_PRAGMA,
    }
)
_NEVER = frozenset({sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH})
_PIECE = re.compile(
    r"""'[^']*+(?:'|$) | "[^"]*+(?:"|$) | `[^`]*+(?:`|$) | \[[^\]]*+(?:\]|$)
    | --[^\n]*+ | /\*[^*]*+(?:\*(?!/)[^*]*+)*(?:\*/|$) | ; | [^'"`\[;/-]++ | .""",
    re.VERBOSE | re.DOTALL,
)

_REFUSED = frozenset(
    ["ATTACH", "DETACH", "LOAD", "EXPORT", "COPY_DATABASE", "SET", "VARIABLE_SET", "EXTENSION"]
)


def _near(message: str, names: dict[str, list[str]]) -> str:
    """A SQLite error with a hint at what may have been meant."""
    table = re.search(r"no such table: (?:\w+\.)?(.+)", message)
    if table:
        known = list(names)
        near = get_close_matches(table[1][:100], known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Tables: {', '.join(known[:20]) or 'none'}."
        return f"{message}. {hint}"
    column = re.search(r"(?:no such column: |has no column named )(?:(\w+)\.)?(.+)", message)
    if column:
        own = names.get(column[1] or "", [])
        known = own or sorted({name for columns in names.values() for name in columns})
        near = get_close_matches(column[2][:100], known, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Columns: {', '.join(known[:30])}."
        return f"{message}. {hint}"
    return message


class Sqlite:
    """A connection to a database file, or to an in-memory database that a script fills."""

    errors: tuple[type[BaseException], ...] = (
        sqlite3.Error,
        sqlite3.Warning,
        OverflowError,
        ValueError,
        OSError,
    )

    def __init__(self, request: Json) -> None:
        self._writable = bool(request["writable"])
        self._deadline = math.inf
        self._timeout = float(request["seconds"])
        try:
            self._connection = self._opened(request)
            self._connection.execute("select count(*) from sqlite_master").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise DatabaseUnusable(f"{type(error).__name__}: {error}") from error
        self._harden(int(request["memory_mb"]))
        self.changed: int | None = None

    def _opened(self, request: Json) -> sqlite3.Connection:
        path = database_path(request)
        if path is None:
            connection = sqlite3.connect(":memory:", isolation_level=None)
        elif self._writable:
            connection = sqlite3.connect(path, isolation_level=None)
        else:
            uri = f"file:{quote(path)}?mode=ro&immutable=1"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
        tables = "select count(*) from sqlite_master"
        if request["script"] is not None and not connection.execute(tables).fetchone()[0]:
            connection.executescript(request["script"])
        return connection

    def _harden(self, memory_mb: int) -> None:
        connection = self._connection
        connection.execute(f"pragma hard_heap_limit={memory_mb << 20}")
        connection.execute("pragma trusted_schema=off")
        connection.execute("pragma temp_store=memory")
        if not self._writable:
            connection.execute("pragma query_only=on")
        for limit, most in (
            (sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE),
            (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
            (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1_000),
            (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
        ):
            connection.setlimit(limit, most)
        self._deadline = time.monotonic() + self._timeout
        connection.set_progress_handler(lambda: time.monotonic() > self._deadline, 1_000)
        connection.set_authorizer(self._authorize)

    def _authorize(
        self, action: int, first: str | None, second: str | None, schema: str | None, trigger: str | None
    ) -> int:
        if action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
            # What declaring a table-valued pragma asks for; writing it needs writable_schema, which is off.
            return sqlite3.SQLITE_OK
        if action in _NEVER or (action not in _READING and not self._writable):
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() not in _READING_PRAGMAS:
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in (
            "load_extension",
            "fts3_tokenizer",
        ):
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def split(self, query: str) -> list[str]:
        found: list[str] = []
        current = ""
        for piece in _PIECE.findall(query):
            if piece.startswith(("--", "/*")):
                piece = " "
            current += piece
            if piece == ";" and (not _is_trigger(current) or sqlite3.complete_statement(current)):
                found.append(current)
                current = ""
        return [one for one in [*found, current] if one.strip(" \t\r\n;")]

    def execute(self, statement: str) -> tuple[list[str] | None, Iterable[Sequence[Any]]]:
        before = self._connection.total_changes
        cursor = self._connection.execute(statement)
        if cursor.description is None:
            self.changed = self._connection.total_changes - before
            return None, iter(())
        self.changed = None
        return [str(column[0]) for column in cursor.description], cursor

    def explain(self, error: BaseException) -> tuple[str, str]:
        message = str(error)
        if message == "interrupted":
            return "timeout", f"the query took longer than {self._timeout:g} s"
        if "out of memory" in message:
            return "memory", "the query needs more memory than it may have"
        if "too big" in message:
            return "refused", f"{message}: a value may have at most {_LONGEST_VALUE:,} bytes"
        if (
            message.startswith(("not authorized", "authorization denied", "attempt to write a readonly"))
            or "prohibited" in message
        ):
            what = "only reading is allowed" if not self._writable else "this is not allowed here"
            return "refused", f"{message}: {what}"
        return "sql", _near(message, self._names())

    def _names(self) -> dict[str, list[str]]:
        try:
            return {table["name"]: [column[0] for column in table["columns"]] for table in self.schema()}
        except sqlite3.Error:
            return {}

    def schema(self) -> list[Json]:
        self._deadline = time.monotonic() + self._timeout
        run = self._connection.execute
        found: list[Json] = []
        listed = "select name, type from sqlite_master where type in ('table', 'view') order by rowid"
        for name, kind in run(listed).fetchall():
            if name.startswith("sqlite_"):
                continue
            quoted = '"' + name.replace('"', '""') + '"'
            try:
                columns = run(f"pragma table_info({quoted})").fetchall()
                references = run(f"pragma foreign_key_list({quoted})").fetchall()
            except sqlite3.Error:  # a view over something that is gone
                columns, references = [], []
            found.append(
                {
                    "name": name,
                    "kind": kind,
                    "columns": [[c[1], c[2], bool(c[5]), not c[3]] for c in columns],
                    "references": [[r[3], r[2], r[4] or ""] for r in references],
                }
            )
        return found


def _is_trigger(statement: str) -> bool:
    return (
        re.match(r"\s*create\s+(?:temp\s+|temporary\s+)?trigger\b", statement, re.IGNORECASE) is not None
    )


class Duck:
    """A connection to a database file, or to an in-memory database that a script fills."""

    errors: tuple[type[BaseException], ...] = (ValueError, OSError)

    def __init__(self, request: Json) -> None:
        import duckdb

        self._duckdb: Any = duckdb
        self.errors = (duckdb.Error, ValueError, OSError, RuntimeError, OverflowError)
        self._timeout = float(request["seconds"])
        self._timed_out = False
        self.changed: int | None = None
        writable = bool(request["writable"])
        try:
            path = database_path(request)
            self._connection = duckdb.connect(
                path or ":memory:",
                read_only=path is not None and not writable,
                config={"threads": 1, "memory_limit": f"{request['memory_mb']}MB", "temp_directory": ""},
            )
            if request["script"] is not None and not self.schema():
                self._connection.execute(request["script"])
        except (duckdb.Error, OSError) as error:
            raise DatabaseUnusable(f"{type(error).__name__}: {error}") from error
        self._read_only = not writable
        for setting in (
            "enable_external_access = false",
            "autoinstall_known_extensions = false",
            "autoload_known_extensions = false",
            "allow_community_extensions = false",
            "enable_progress_bar = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")
        self._timer = threading.Timer(self._timeout, self._interrupt)
        self._timer.daemon = True
        self._timer.start()

    def _interrupt(self) -> None:
        self._timed_out = True
        self._connection.interrupt()

    def split(self, query: str) -> list[Any]:
        statements: list[Any] = list(self._connection.extract_statements(query))
        return statements

    def execute(self, statement: Any) -> tuple[list[str] | None, Iterable[Sequence[Any]]]:
        kind = str(statement.type).rpartition(".")[2].upper()
        if self._read_only and kind not in ("SELECT", "EXPLAIN"):
            raise Refused(f"{kind} is not allowed: only reading is")
        if kind in _REFUSED:
            raise Refused(f"{kind} is not allowed here")
        cursor = self._connection.execute(statement)
        if cursor.description is None or kind in ("CREATE", "DROP", "ALTER", "TRANSACTION"):
            return None, iter(())
        if kind in ("INSERT", "UPDATE", "DELETE"):
            rows = cursor.fetchall()
            self.changed = int(rows[0][0]) if rows and isinstance(rows[0][0], int) else None
            return None, iter(())
        self.changed = None
        return [str(column[0]) for column in cursor.description], _fetched(cursor.fetchmany)

    def explain(self, error: BaseException) -> tuple[str, str]:
        if self._timed_out:
            return "timeout", f"the query took longer than {self._timeout:g} s"
        message = str(error)
        if isinstance(error, self._duckdb.OutOfMemoryException):
            return "memory", "the query needs more memory than it may have"
        if isinstance(error, self._duckdb.PermissionException) or "disabled by configuration" in message:
            return "refused", message.splitlines()[0]
        return "sql", message

    def schema(self) -> list[Json]:
        run = self._connection.execute
        tables = run(
            "select schema_name, table_name, 'table' from duckdb_tables() where not internal union all "
            "select schema_name, view_name, 'view' from duckdb_views() where not internal order by all"
        ).fetchall()
        columns = run(
            "select schema_name, table_name, column_name, data_type, is_nullable from duckdb_columns() "
            "where not internal order by schema_name, table_name, column_index"
        ).fetchall()
        keys = run(
            "select schema_name, table_name, constraint_type, constraint_column_names, referenced_table, "
            "referenced_column_names from duckdb_constraints()"
        ).fetchall()
        primary = {(k[0], k[1], name) for k in keys if k[2] == "PRIMARY KEY" for name in k[3]}
        return [
            {
                "name": table if schema == "main" else f"{schema}.{table}",
                "kind": kind,
                "columns": [
                    [c[2], c[3], (schema, table, c[2]) in primary, bool(c[4])]
                    for c in columns
                    if (c[0], c[1]) == (schema, table)
                ],
                "references": [
                    [own, k[4], other]
                    for k in keys
                    if (k[0], k[1], k[2]) == (schema, table, "FOREIGN KEY")
                    for own, other in zip(k[3], k[5], strict=False)
                ],
            }
            for schema, table, kind in tables
        ]


def _fetched(fetch: Callable[[int], list[Any]]) -> Iterator[Sequence[Any]]:
    while rows := fetch(1_000):
        yield from rows
