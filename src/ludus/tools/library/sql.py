"""`sql` and `schema`: a database that the model may ask, or a scratch copy that it may change."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Literal

from ludus.core.config import Config
from ludus.core.failures import ConfigError, Fault, ToolFault
from ludus.core.messages import ToolContext, ToolResult
from ludus.sandbox.sql import Database, QueryResult, SqlLimits, SqlProblem, read_schema, run_query
from ludus.tools.library.kits import Kit
from ludus.tools.library.sandboxed import SandboxTool
from ludus.tools.library.sessions import EpisodeSessions
from ludus.tools.library.tables import described, rendered

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
    """What the model calls it. The schema is `schema`, or `<name>_schema` under another name."""


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
        async with self.sessions.use(context) as place:
            result = await run_query(
                place.session,
                self.database,
                query,
                self.limits,
                scratch=self.scratch,
                single=self.scratch is None,
                control=self.sessions.config,
            )
        note = f"{place.note}\n" if place.note and self.scratch else ""
        if not result.ok:
            return ToolResult(note + _problem(result), fault=_fault(result))
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
        async with self.sessions.use(context) as place:
            tables = await read_schema(
                place.session,
                self.database,
                self.limits,
                scratch=self.scratch,
                control=self.sessions.config,
            )
        if isinstance(tables, QueryResult):
            return ToolResult(_problem(tables), fault=_fault(tables))
        text = described(tables, table)
        if text:
            return ToolResult(text)
        names = [one.name for one in tables]
        if table is None:
            return ToolResult("the database has no tables")
        near = get_close_matches(table[:100], names, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Tables: {', '.join(names)}."
        raise ToolFault(f"there is no table {table[:100]!r}. {hint}")


def _problem(result: QueryResult) -> str:
    return f"Error: {result.message}"


def _fault(result: QueryResult) -> Fault:
    return _FAULTS.get(result.problem or SqlProblem.SQL, Fault.TOOL_RAISED)


SQL = Kit(
    SqlOptions,
    lambda options, sessions: [SqlTool(sessions, options), SchemaTool(sessions, options)],
    lambda options: Database.of(options.database, options.engine).readable,
)
