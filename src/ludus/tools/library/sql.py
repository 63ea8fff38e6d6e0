"""`sql` and `schema`: a database that the model may ask, or a scratch copy that it may change."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from difflib import get_close_matches
from typing import Literal

from ludus.core.config import Config
from ludus.core.failures import ConfigError, Fault, ToolFault
from ludus.core.messages import ToolContext, ToolResult
from ludus.sandbox.sql import (
    Blob,
    Database,
    LongText,
    QueryResult,
    SqlLimits,
    SqlProblem,
    TableSchema,
    Value,
    read_schema,
    run_query,
)
from ludus.tools.library import Toolkit
from ludus.tools.library.sandbox import EpisodeSessions, SandboxTool

_WIDEST = 60
_LINE_BREAKS = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0", "\x1b": "\\x1b"})
_MOST_BYTES = 30_000
_MOST_CELL = 100
_FAULTS = {SqlProblem.TIMEOUT: Fault.TOOL_TIMEOUT, SqlProblem.MEMORY: Fault.LIMIT}
_READING = "It can only be read."
_WRITING = "It is a copy of your own, which you may change; temporary tables last for one call."


class SqlOptions(Config):
    """Options of `sql`."""

    database: str
    """A SQLite or DuckDB file, or a .sql script that makes the database."""
    engine: Literal["sqlite", "duckdb"] | None = None
    """Read from the file when not given."""
    mode: Literal["read_only", "scratch"] = "read_only"
    """scratch gives each episode a copy, which lives in its session's folder."""
    max_rows: int = 50
    """Rows that the model reads; the others are counted."""
    seconds: float = 5.0
    """Time for one query."""
    memory_mb: int = 256
    """Memory for one query."""
    name: str = "sql"
    """The name of the tool. The schema is `schema`, or `<name>_schema` under another name."""


class _DatabaseTool(SandboxTool):
    def __init__(self, sessions: EpisodeSessions, options: SqlOptions, name: str) -> None:
        self.database = Database.of(options.database, options.engine)
        self.limits = SqlLimits(
            seconds=options.seconds,
            memory_mb=options.memory_mb,
            max_rows=options.max_rows,
            max_bytes=_MOST_BYTES,
            max_cell=_MOST_CELL,
        )
        ending = ".duckdb" if self.database.engine == "duckdb" else ".db"
        self.scratch = None if options.mode == "read_only" else self.database.path.stem + ending
        size = self.database.path.stat().st_size >> 20
        if self.scratch and size >= sessions.config.limits.disk_mb:
            raise ConfigError(
                f"the tool {name!r}: a scratch copy of {self.database.path} takes {size} MB, and a session has "
                f"{sessions.config.limits.disk_mb}; raise disk_mb in the sandbox's limits"
            )
        super().__init__(sessions, name)


class SqlTool(_DatabaseTool):
    """Run a SQL query and read its rows.

    Args:
        query: The query.
    """

    def __init__(self, sessions: EpisodeSessions, options: SqlOptions) -> None:
        engine = (
            "SQLite" if Database.of(options.database, options.engine).engine == "sqlite" else "DuckDB"
        )
        rights = _READING if options.mode == "read_only" else _WRITING
        self.description = f"Run a SQL query against the {engine} database and read its rows. {rights}"
        super().__init__(sessions, options, options.name)

    async def run(self, query: str, context: ToolContext) -> ToolResult:
        async with self.sessions.use(context) as lease:
            result = await run_query(
                lease.session,
                self.database,
                query,
                self.limits,
                scratch=self.scratch,
                single=self.scratch is None,
                control=self.sessions.config,
            )
        note = f"{lease.note}\n" if lease.note and self.scratch else ""
        if not result.ok:
            return ToolResult(note + problem_of(result), fault=fault_of(result))
        return ToolResult(note + rendered(result))


class SchemaTool(_DatabaseTool):
    """Show the tables of the database with their columns, types and keys.

    Args:
        table: One table; all of them when left out.
    """

    def __init__(self, sessions: EpisodeSessions, options: SqlOptions) -> None:
        super().__init__(
            sessions, options, "schema" if options.name == "sql" else f"{options.name}_schema"
        )

    async def run(self, context: ToolContext, table: str | None = None) -> ToolResult:
        async with self.sessions.use(context) as lease:
            tables = await read_schema(
                lease.session,
                self.database,
                self.limits,
                scratch=self.scratch,
                control=self.sessions.config,
            )
        if isinstance(tables, QueryResult):
            return ToolResult(problem_of(tables), fault=fault_of(tables))
        text = described(tables, table)
        if text:
            return ToolResult(text)
        names = [one.name for one in tables]
        if table is None:
            return ToolResult("the database has no tables")
        near = get_close_matches(table[:100], names, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Tables: {', '.join(names)}."
        raise ToolFault(f"there is no table {table[:100]!r}. {hint}")


def problem_of(result: QueryResult) -> str:
    """The error text for the model, for a query without a result."""
    return f"Error: {result.message}"


def fault_of(result: QueryResult) -> Fault:
    """The kind of fault of a query without a result."""
    return _FAULTS.get(result.problem or SqlProblem.SQL, Fault.TOOL_RAISED)


SQL = Toolkit(
    SqlOptions,
    lambda options, sessions: [SqlTool(sessions, options), SchemaTool(sessions, options)],
    lambda options: Database.of(options.database, options.engine).readable,
)


# Query results and schemas as text: aligned, compact, and of a bounded width


def rendered(result: QueryResult) -> str:
    """The rows as a table, and how many there are; or what a statement without rows did."""
    if result.columns is None:
        return "done" if result.changed is None else f"done; {_count(result.changed, 'row')} changed"
    if not result.total:
        return f"{' | '.join(_short(name) for name in result.columns)}\n(0 rows)"
    cells = [[_short(name) for name in result.columns]]
    cells += [[shown(value) for value in row] for row in result.rows]
    return "\n".join([*_aligned(cells, result.rows), _ending(result)])


def shown(value: Value) -> str:
    """One value, on one line."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Blob):
        more = "..." if value.size * 2 > len(value.start) else ""
        return f"x'{value.start}{more}' ({_count(value.size, 'byte')})"
    if isinstance(value, LongText):
        return f"{_short(value.start)} ({value.length:,} characters)"
    if isinstance(value, tuple):
        return _short("[" + ", ".join(shown(item) for item in value[:20]) + "]")
    if isinstance(value, str):
        return _short(value)
    return str(value)


def described(tables: Sequence[TableSchema], only: str | None = None) -> str:
    """Tables, one per line: columns with types, keys, and what they refer to."""
    lines: list[str] = []
    for table in tables:
        if only is not None and table.name.lower() != only.lower():
            continue
        columns = ", ".join(_column(table, position) for position in range(len(table.columns)))
        kind = "" if table.kind == "table" else f" -- {table.kind}"
        lines.append(f"{_short(table.name)}({columns}){kind}")
    return "\n".join(lines)


def _column(table: TableSchema, position: int) -> str:
    column = table.columns[position]
    words = [_short(column.name), column.type]
    words += ["PRIMARY KEY"] if column.is_key else []
    words += ["NOT NULL"] if not column.nullable and not column.is_key else []
    for own, other, target in table.references:
        if own == column.name:
            words.append(f"-> {other}.{target}" if target else f"-> {other}")
    return " ".join(word for word in words if word)


def _aligned(cells: Sequence[Sequence[str]], rows: Sequence[Sequence[Value]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    numeric = [all(_is_number(row[i]) for row in rows) and bool(rows) for i in range(len(widths))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        return " | ".join(padded).rstrip()

    return [
        line(cells[0]),
        "-+-".join("-" * width for width in widths),
        *(line(row) for row in cells[1:]),
    ]


def _is_number(value: Value) -> bool:
    return value is None or (isinstance(value, int | float | Decimal) and not isinstance(value, bool))


def _ending(result: QueryResult) -> str:
    total = _count(result.total, "row") if result.counted else f"more than {result.total:,} rows"
    if result.complete:
        return f"({total})"
    left = f"{result.total - len(result.rows):,}" + ("" if result.counted else " or more")
    return f"... {left} more rows ({total} in all)"


def _short(text: str) -> str:
    line = text[: _WIDEST + 1].translate(_LINE_BREAKS)
    return line if len(text) <= _WIDEST else line[: _WIDEST - 3] + "..."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
