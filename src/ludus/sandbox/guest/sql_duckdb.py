"""DuckDB without access to files, extensions or the network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ludus.sandbox.guest.sql_entry import DatabaseUnusable, Json, Refused, database_path

_REFUSED = frozenset(
    ["ATTACH", "DETACH", "LOAD", "EXPORT", "COPY_DATABASE", "SET", "VARIABLE_SET", "EXTENSION"]
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
