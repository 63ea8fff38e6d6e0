"""SQL in the sandbox: SQLite and DuckDB, read-only or on a scratch copy, within limits.

Each query runs in its own process, either alone (`run_query` with a `Sandbox`) or beside the other programs of
a session, whose files it then sees (`run_query` with a `Session`). Nothing is kept between queries but the
files: a scratch copy of the database stays in the session's folder. The code on the other side is
`guest/sql_*.py`.

When a query gets no answer, the query or what ran in its session before is at fault, unless the host can prove
otherwise: the database cannot be read in a fresh sandbox either (`InfraError`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

from ludus.core.config import Config
from ludus.core.failures import Boundary, ConfigError, InfraError, MissingExtraError
from ludus.sandbox import Execution, Limits, Outcome, Sandbox, SandboxConfig, Session, bundle, call

SqlEngineName = Literal["sqlite", "duckdb"]
T = TypeVar("T")

_DEEPEST = 60
_MOST_QUERY = 100_000
_MOST_SCRIPT = 20_000_000
_MARGIN_SECONDS = 5.0
_ENGINE_MB = 512
"""Memory of an engine and its interpreter, besides the memory for the query itself."""
_GUEST = "ludus.sandbox.guest"
_DUCKDB_ENDINGS = (".duckdb", ".ddb")
_DUCKDB_MARK = b"DUCK"
_SQLITE_MARK = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class Database:
    """A database by its file, or the script that makes one. Use `Database.of`."""

    path: Path
    engine: SqlEngineName
    script: str | None = None

    @classmethod
    def of(cls, path: str | Path, engine: SqlEngineName | None = None) -> Database:
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
    def _checked(cls, path: Path, engine: SqlEngineName, script: str | None) -> Database:
        if engine == "duckdb":
            try:
                import duckdb  # noqa: F401 - asked for here, used in the sandbox
            except ImportError:
                raise MissingExtraError("duckdb", "sql", "a DuckDB database") from None
        return cls(path, engine, script)

    @property
    def readable(self) -> tuple[str, ...]:
        """Files that a sandbox must be able to see: `SandboxConfig.readable`."""
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
    """Bytes of JSON that leave the sandbox as rows."""
    max_cell: int | None = None
    """Characters of one text; longer ones leave as their beginning. None keeps them whole."""


class SqlProblem(StrEnum):
    """Why a query has no result. Each is the fault of the query's author."""

    SQL = "sql"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Blob:
    """A value of bytes, by its size, its first bytes in hexadecimal and its SHA-256."""

    size: int
    start: str
    digest: str


@dataclass(frozen=True, slots=True)
class LongText:
    """The beginning of a text that was too long to leave as a whole."""

    start: str
    length: int


Value = None | bool | int | float | str | Decimal | Blob | LongText | tuple[Any, ...]
Row = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Rows, or a problem. `columns` is None for a statement that gives no table."""

    columns: tuple[str, ...] | None = None
    rows: tuple[Row, ...] = ()
    total: int = 0
    counted: bool = True
    """Whether `total` counts all rows; counting stops at a million."""
    changed: int | None = None
    problem: SqlProblem | None = None
    message: str = ""
    seconds: float = field(default=0.0, compare=False)
    """How long it ran, its process included; waiting for a place in the sandbox does not count."""

    @property
    def ok(self) -> bool:
        return self.problem is None

    @property
    def complete(self) -> bool:
        """Whether `rows` are all the rows there are."""
        return self.counted and len(self.rows) == self.total


@dataclass(frozen=True, slots=True)
class ColumnSchema:
    name: str
    type: str
    is_key: bool = False
    nullable: bool = True


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table or a view. `references` are (column, other table, its column)."""

    name: str
    kind: str
    columns: tuple[ColumnSchema, ...]
    references: tuple[tuple[str, str, str], ...] = ()


def _engine_of(path: Path) -> SqlEngineName:
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
    """Run a query. What is wrong with it is in the result; `InfraError` is an infrastructure failure.

    Without `scratch` nothing can be written. With it, the query uses a copy of the database that lives in the
    session's folder under this name. `single` refuses more than one statement. `control` are the settings of a
    session's sandbox, to find out who is at fault; without them, every failure in a session is `InfraError`.
    """
    limits = limits or SqlLimits()
    if len(query) > _MOST_QUERY:
        return QueryResult(
            problem=SqlProblem.REFUSED, message=f"the query is longer than {_MOST_QUERY:,} characters"
        )
    request = _request(database, limits, scratch) | {"what": "query", "query": query, "single": single}
    return await _answered(where, database, request, limits, control, _parse_result)


async def read_schema(
    where: Sandbox | Session,
    database: Database,
    limits: SqlLimits | None = None,
    *,
    scratch: str | None = None,
    control: SandboxConfig | None = None,
) -> tuple[TableSchema, ...] | QueryResult:
    """The tables of a database; a result with its problem where they cannot be read. See `run_query`."""
    limits = limits or SqlLimits()
    request = _request(database, limits, scratch) | {"what": "schema"}
    return await _answered(where, database, request, limits, control, _parse_schema)


async def _answered(
    where: Sandbox | Session,
    database: Database,
    request: dict[str, Any],
    limits: SqlLimits,
    control: SandboxConfig | None,
    parse: Callable[[dict[str, Any]], T],
) -> T | QueryResult:
    """The answer to a request; without a readable one, find out who is at fault."""
    try:
        answer = await _ask(where, database, request, limits)
        return answer if isinstance(answer, QueryResult) else _parsed(parse, answer)
    except _NoAnswer as failure:
        if isinstance(where, Session) and control is None:
            raise
        harmless = request | {"what": "schema"}
        if isinstance(where, Sandbox):
            read = await _ask(where, database, harmless, limits)
        else:  # in its own sandbox: a caller that holds a session must not wait for a second one (deadlock)
            assert control is not None
            async with (
                Sandbox(control.model_copy(update={"workers": 1})) as box,
                await box.session() as fresh,
            ):
                read = await _ask(fresh, database, harmless, limits)
        if isinstance(read, QueryResult):  # even reading its schema takes too long, or too much memory
            raise _NoAnswer(f"the database cannot be used: {read.message}") from failure
        return QueryResult(problem=SqlProblem.CRASH, message=f"the query has no result: {failure}"[:600])


def _request(database: Database, limits: SqlLimits, scratch: str | None) -> dict[str, Any]:
    return {
        "engine": database.engine,
        "path": None if database.script is not None else str(database.path),
        "script": database.script,
        "scratch": scratch,
        "writable": scratch is not None,
        **limits.model_dump(),
    }


async def _ask(
    where: Sandbox | Session, database: Database, request: dict[str, Any], limits: SqlLimits
) -> dict[str, Any] | QueryResult:
    modules = (f"{_GUEST}.sql_entry", f"{_GUEST}.sql_engines")
    code = bundle(*modules, then=call(modules[0], "main"))
    stdin = json.dumps(request)
    wall = limits.seconds + _MARGIN_SECONDS
    if isinstance(where, Session):
        # In its own process: the session's interpreter may be tampered with, and must stay forkable.
        execution = await where.run([sys.executable, "-I", "-c", code], stdin=stdin, wall_seconds=wall)
    else:
        bounds = Limits(
            wall_seconds=wall,
            cpu_seconds=wall,
            output_bytes=2 * limits.max_bytes + 64_000,
            memory_mb=limits.memory_mb + _ENGINE_MB,
        )
        execution = await where.python(code, stdin=stdin, limits=bounds)
    answer = _guest_answer(execution)
    if isinstance(answer, QueryResult):
        return replace(answer, seconds=execution.seconds)
    return answer | {"seconds": execution.seconds}


def _guest_answer(execution: Execution) -> dict[str, Any] | QueryResult:
    """The guest's answer, or the limit that it exceeded."""
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


def _parsed(parse: Callable[[dict[str, Any]], T], answer: dict[str, Any]) -> T:
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
    """There is no readable answer: an infrastructure failure, unless the query is shown to be at fault."""

    def __init__(self, message: str) -> None:
        super().__init__(Boundary.SANDBOX, message, retriable=False)


def _parse_result(answer: Mapping[str, Any]) -> QueryResult:
    """The result in the guest's answer; `ValueError` or `KeyError` where it is malformed."""
    if "error" in answer:
        error = answer["error"]
        problem, message = SqlProblem(error["kind"]), str(error["message"])
        return QueryResult(problem=problem, message=message, seconds=answer["seconds"])
    columns, changed = answer["columns"], answer["changed"]
    rows = tuple(tuple(_decoded_value(value) for value in row) for row in answer["rows"])
    if any(len(row) != len(columns or ()) for row in rows) or not isinstance(changed, int | None):
        raise ValueError("the rows do not fit their columns")
    return QueryResult(
        None if columns is None else tuple(str(name) for name in columns),
        rows,
        int(answer["total"]),
        bool(answer["counted"]),
        changed,
        seconds=answer["seconds"],
    )


def _parse_schema(answer: Mapping[str, Any]) -> tuple[TableSchema, ...] | QueryResult:
    if "tables" not in answer:
        return _parse_result(answer)
    return tuple(
        TableSchema(
            str(table["name"]),
            str(table["kind"]),
            tuple(ColumnSchema(str(n), str(t), bool(k), bool(m)) for n, t, k, m in table["columns"]),
            tuple((str(own), str(other), str(column)) for own, other, column in table["references"]),
        )
        for table in answer["tables"]
    )


def _decoded_value(value: Any, depth: int = 0) -> Value:
    if depth > _DEEPEST:
        raise ValueError(f"a value is nested more than {_DEEPEST} deep")
    if not isinstance(value, dict):
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"a value cannot be a {type(value).__name__}")
    [(tag, inner)] = value.items()
    if tag == "f":
        return float(inner)
    if tag == "b":
        size, start, digest = inner
        return Blob(int(size), str(start), str(digest))
    if tag == "n":
        number = Decimal(inner)
        if not number.is_finite():
            raise ValueError("a decimal that is no number")
        return number
    if tag == "c":
        start, length = inner
        return LongText(str(start), int(length))
    if tag == "l":
        return tuple(_decoded_value(item, depth + 1) for item in inner)
    if tag == "o":
        return tuple(
            (_decoded_value(key, depth + 1), _decoded_value(item, depth + 1)) for key, item in inner
        )
    if tag == "x":
        return str(inner)
    raise ValueError(f"there is no value of the kind {tag!r}")
