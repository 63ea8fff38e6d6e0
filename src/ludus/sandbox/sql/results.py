"""What a query gave, rebuilt from the JSON that left the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any

_DEEPEST = 60


class SqlProblem(StrEnum):
    """Why a query has no result. Each is the fault of whoever wrote the query."""

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
    """Whether `total` counts all rows; beyond a million nobody counts on."""
    changed: int | None = None
    problem: SqlProblem | None = None
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.problem is None

    @property
    def complete(self) -> bool:
        """Whether `rows` are all the rows there are."""
        return self.counted and len(self.rows) == self.total


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, as its schema has it."""

    name: str
    type: str
    is_key: bool = False
    nullable: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A table or a view. `references` are (column, other table, its column)."""

    name: str
    kind: str
    columns: tuple[Column, ...]
    references: tuple[tuple[str, str, str], ...] = ()


def parse_result(answer: Mapping[str, Any]) -> QueryResult:
    """The result in an answer from inside; `ValueError` or `KeyError` where it is none."""
    if "error" in answer:
        error = answer["error"]
        return QueryResult(problem=SqlProblem(error["kind"]), message=str(error["message"]))
    columns, changed = answer["columns"], answer["changed"]
    rows = tuple(tuple(_decoded(value) for value in row) for row in answer["rows"])
    if any(len(row) != len(columns or ()) for row in rows) or not isinstance(changed, int | None):
        raise ValueError("the rows do not fit their columns")
    return QueryResult(
        None if columns is None else tuple(str(name) for name in columns),
        rows,
        int(answer["total"]),
        bool(answer["counted"]),
        changed,
    )


def parse_schema(tables: Sequence[Mapping[str, Any]]) -> tuple[Table, ...]:
    """The tables of a database."""
    return tuple(
        Table(
            str(table["name"]),
            str(table["kind"]),
            tuple(Column(str(n), str(t), bool(k), bool(m)) for n, t, k, m in table["columns"]),
            tuple((str(own), str(other), str(column)) for own, other, column in table["references"]),
        )
        for table in tables
    )


def _decoded(value: Any, depth: int = 0) -> Value:
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
        return tuple(_decoded(item, depth + 1) for item in inner)
    if tag == "o":
        return tuple((_decoded(key, depth + 1), _decoded(item, depth + 1)) for key, item in inner)
    if tag == "x":
        return str(inner)
    raise ValueError(f"there is no value of the kind {tag!r}")
