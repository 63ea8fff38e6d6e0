"""SQL from the outside: a database, a query, and the sandbox that runs it.

Each query runs in a process of its own, either alone (`run_query` with a `Sandbox`) or beside the other
programs of a session, whose files it then sees (`run_query` with a `Session`). Nothing is kept between
queries but the files: a scratch copy of the database stays in the session's folder.

A query that gets no answer is at fault itself, or what has run in its session before, unless the host can prove
otherwise: the database cannot be read in a fresh place either (`InfraError`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ludus.core.config import Config
from ludus.core.failures import Boundary, ConfigError, InfraError, MissingExtraError
from ludus.sandbox import Execution, Limits, Outcome, Sandbox, SandboxConfig, Session
from ludus.sandbox.bundling import bundle, call
from ludus.sandbox.sql.results import QueryResult, SqlProblem, Table, parse_result, parse_schema

Engine = Literal["sqlite", "duckdb"]
T = TypeVar("T")

_MOST_QUERY = 100_000
_MOST_SCRIPT = 20_000_000
_MARGIN_SECONDS = 5.0
_ENGINE_MB = 512
"""What an engine and the interpreter around it take besides the memory for the query itself."""
_INSIDE = "ludus.sandbox.sql.inside"
_DUCKDB_ENDINGS = (".duckdb", ".ddb")
_DUCKDB_MARK = b"DUCK"
_SQLITE_MARK = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class Database:
    """A database by its file, or the script that makes one. Use `Database.of`."""

    path: Path
    engine: Engine
    script: str | None = None

    @classmethod
    def of(cls, path: str | Path, engine: Engine | None = None) -> Database:
        """The database in a file; without `engine`, the file's first bytes and its name decide."""
        found = Path(path).resolve()
        if not found.is_file():
            raise ConfigError(f"there is no database {found}")
        if engine is not None and engine not in ("sqlite", "duckdb"):
            raise ConfigError(f"a database's engine is 'sqlite' or 'duckdb', not {engine!r}")
        if found.suffix.lower() == ".sql":
            if found.stat().st_size > _MOST_SCRIPT:
                raise ConfigError(
                    f"{found} is larger than {_MOST_SCRIPT >> 20} MB; make a database file of it"
                )
            return cls._checked(found, engine or "sqlite", found.read_text(encoding="utf-8"))
        return cls._checked(found, engine or _engine_of(found), None)

    @classmethod
    def _checked(cls, path: Path, engine: Engine, script: str | None) -> Database:
        if engine == "duckdb":
            try:
                import duckdb  # noqa: F401 - asked for here, used in the sandbox
            except ImportError:
                raise MissingExtraError("duckdb", "sql", "a DuckDB database") from None
        return cls(path, engine, script)

    @property
    def readable(self) -> tuple[str, ...]:
        """What a sandbox must be able to see: `SandboxConfig.readable`."""
        return () if self.script is not None else (str(self.path),)


class SqlLimits(Config):
    """How much one query may take, and how much of its result leaves the sandbox."""

    seconds: float = 5.0
    """Time for one query."""
    memory_mb: int = 256
    """Memory for one query, as the engine counts it."""
    max_rows: int = 20_000
    """Rows that leave the sandbox; the others are counted."""
    max_bytes: int = 4_000_000
    """The same in bytes of JSON."""
    max_cell: int | None = None
    """Characters of one text; longer ones leave as their beginning. None keeps them whole."""


def _engine_of(path: Path) -> Engine:
    with path.open("rb") as file:
        start = file.read(16)
    if start == _SQLITE_MARK:
        return "sqlite"
    return (
        "duckdb" if start[8:12] == _DUCKDB_MARK or path.suffix.lower() in _DUCKDB_ENDINGS else "sqlite"
    )


async def run_query(
    where: Sandbox | Session,
    database: Database,
    query: str,
    limits: SqlLimits | None = None,
    *,
    scratch: str | None = None,
    single: bool = True,
    control: SandboxConfig | None = None,
) -> QueryResult:
    """Run a query. What is wrong with it is in the result; `InfraError` means that we failed.

    Without `scratch` nothing can be written. With it, a copy of the database is used that lives in the
    session's folder under this name. `single` refuses more than one statement. `control` are the settings of a
    session's sandbox, to find out who is at fault; without them, what breaks in a session is called ours.
    """
    limits = limits or SqlLimits()
    if len(query) > _MOST_QUERY:
        return QueryResult(
            problem=SqlProblem.REFUSED, message=f"the query is longer than {_MOST_QUERY:,} characters"
        )
    request = _request(database, limits, scratch) | {"what": "query", "query": query, "single": single}
    return await _settled(where, database, request, limits, control, parse_result)


async def read_schema(
    where: Sandbox | Session,
    database: Database,
    limits: SqlLimits | None = None,
    *,
    scratch: str | None = None,
    control: SandboxConfig | None = None,
) -> tuple[Table, ...] | QueryResult:
    """The tables of a database; a result with its problem where they cannot be read. See `run_query`."""
    limits = limits or SqlLimits()
    request = _request(database, limits, scratch) | {"what": "schema"}
    return await _settled(where, database, request, limits, control, _schema)


def _schema(answer: dict[str, Any]) -> tuple[Table, ...] | QueryResult:
    return parse_schema(answer["tables"]) if "tables" in answer else parse_result(answer)


async def _settled(
    where: Sandbox | Session,
    database: Database,
    request: dict[str, Any],
    limits: SqlLimits,
    control: SandboxConfig | None,
    parse: Callable[[dict[str, Any]], T],
) -> T | QueryResult:
    """The answer to a request, or whose doing it is that there is none that can be read."""
    try:
        answer = await _ask(where, database, request, limits)
        return answer if isinstance(answer, QueryResult) else _read(parse, answer)
    except _NoAnswer as failure:
        if isinstance(where, Session) and control is None:
            raise
        harmless = request | {"what": "schema"}
        if isinstance(where, Sandbox):
            read = await _ask(where, database, harmless, limits)
        else:  # in a sandbox of its own: whoever holds a session must not wait for a second one
            assert control is not None
            async with (
                Sandbox(control.model_copy(update={"workers": 1})) as box,
                await box.session() as fresh,
            ):
                read = await _ask(fresh, database, harmless, limits)
        if isinstance(read, QueryResult):  # even the schema of it takes too long, or too much memory
            raise _NoAnswer(f"the database cannot be used: {read.message}") from failure
        return QueryResult(problem=SqlProblem.CRASH, message=f"the query has no result: {failure}"[:600])


def _request(database: Database, limits: SqlLimits, scratch: str | None) -> dict[str, Any]:
    return {
        "engine": database.engine,
        "path": None if database.script is not None else str(database.path),
        "script": database.script,
        "scratch": scratch,
        "writable": scratch is not None,
        "timeout": limits.seconds,
        "memory_mb": limits.memory_mb,
        "max_rows": limits.max_rows,
        "max_bytes": limits.max_bytes,
        "max_cell": limits.max_cell,
    }


async def _ask(
    where: Sandbox | Session, database: Database, request: dict[str, Any], limits: SqlLimits
) -> dict[str, Any] | QueryResult:
    engine = "sqlite_engine" if database.engine == "sqlite" else "duckdb_engine"
    modules = [f"{_INSIDE}.{name}" for name in ("values", engine, "entry")]
    code = bundle(*modules, then=call(f"{_INSIDE}.entry", "main"))
    stdin = json.dumps(request)
    wall = limits.seconds + _MARGIN_SECONDS
    if isinstance(where, Session):
        # A process of its own: the session's interpreter may have been tampered with, and stays forkable.
        execution = await where.run([sys.executable, "-I", "-c", code], stdin=stdin, wall_seconds=wall)
    else:
        bounds = Limits(
            wall_seconds=wall,
            cpu_seconds=wall,
            output_bytes=2 * limits.max_bytes + 64_000,
            memory_mb=limits.memory_mb + _ENGINE_MB,
        )
        execution = await where.python(code, stdin=stdin, limits=bounds)
    return _answer(execution)


def _answer(execution: Execution) -> dict[str, Any] | QueryResult:
    """What the inside said, or which limit it hit before it could."""
    if execution.outcome in (Outcome.TIMEOUT, Outcome.CPU):
        return QueryResult(problem=SqlProblem.TIMEOUT, message="the query took too long and was stopped")
    if execution.outcome is Outcome.MEMORY:
        return QueryResult(
            problem=SqlProblem.MEMORY, message="the query needs more memory than it may have"
        )
    if execution.outcome is Outcome.OUTPUT or execution.truncated:
        return QueryResult(problem=SqlProblem.MEMORY, message="the result is too large")
    if execution.outcome is Outcome.KILLED:
        return QueryResult(problem=SqlProblem.CRASH, message="the query crashed the database engine")
    try:
        answer = json.loads(execution.stdout)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise _NoAnswer(
            f"the SQL runner gave no answer ({execution.outcome}): {execution.text()[-500:]}"
        )
    if "failure" in answer:
        why = answer["failure"] if isinstance(answer["failure"], str) else "no reason was given"
        raise _NoAnswer(f"the database cannot be used: {why[:500]}")
    return answer


def _read(parse: Callable[[dict[str, Any]], T], answer: dict[str, Any]) -> T:
    try:
        return parse(answer)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise _NoAnswer(
            f"the SQL runner's answer cannot be read: {type(error).__name__}: {error}"
        ) from error


class _NoAnswer(InfraError):
    """There is no answer that can be read. Ours, unless it is found out that it is not."""

    def __init__(self, message: str) -> None:
        super().__init__(Boundary.SANDBOX, message, retriable=False)
