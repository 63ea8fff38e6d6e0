"""The SQL runner in the guest: one request from stdin, one JSON answer to stdout.

`sql_entry` and `sql_engines` are sent to the sandbox as text (`sandbox.exchange`), so they
import the standard library (and duckdb) only. They harden the engines against the model's SQL: read-only
connections, an authorizer, no attached files, no extensions, limits on time, memory, values and rows. The
sandbox bounds whatever that misses.

Values leave as JSON: null, booleans, numbers and text as they are; everything else as an object with
one key: "f" a float that is not finite, "b" a blob (size, first bytes, digest), "n" a decimal, "c" the
beginning of a long text and its length, "l" a list, "o" pairs of a map, "x" the text of anything else.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

Json = dict[str, Any]

_MOST_STATEMENTS = 100
_MOST_MESSAGE = 600
_MOST_COUNTED = 1_000_000
_DEEPEST = 50
"""Lists in lists; the host (`sandbox.sql`) accepts a few more."""


class Refused(Exception):
    """The query asks for something that is not allowed here."""


class DatabaseUnusable(Exception):
    """The database itself cannot be used: no query is at fault."""


class SqlEngine(Protocol):
    errors: tuple[type[BaseException], ...]
    changed: int | None

    def split(self, query: str) -> list[Any]:
        """The statements of a query."""

    def execute(self, statement: Any) -> tuple[list[str] | None, Iterable[Sequence[Any]]]:
        """The names of the columns, None where there is no table, and the rows."""

    def explain(self, error: BaseException) -> tuple[str, str]:
        """The kind of an error and a short message."""

    def schema(self) -> list[Json]:
        """Tables and views: columns (name, type, is key, may be null), and references to other tables."""


def main() -> None:
    """Answer the request on stdin. What an engine prints, such as a progress bar, goes to stderr."""
    request = json.loads(sys.stdin.read())
    out = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(out, "w", encoding="utf-8") as file:
        file.write(json.dumps(answer(request)) + "\n")


def answer(request: Json) -> Json:
    """The result of a request, or its error; `failure` when the database is at fault."""
    try:
        connection = _connect(request)
    except DatabaseUnusable as error:
        return {"failure": str(error)[:_MOST_MESSAGE]}
    try:
        if request["what"] == "schema":
            return {"tables": connection.schema()}
        return _run_statements(connection, request)
    except Refused as error:
        return _error("refused", str(error))
    except MemoryError:
        return _error("memory", "the query needs more memory than it may have")
    except connection.errors as error:
        kind, message = connection.explain(error)
        return _error(kind, message)
    except Exception as error:  # noqa: BLE001 - the database is fine, so it is the query's doing
        return _error("crash", f"{type(error).__name__}: {error}")


def _connect(request: Json) -> SqlEngine:
    from ludus.sandbox.guest.sql_engines import Duck, Sqlite

    return Sqlite(request) if request["engine"] == "sqlite" else Duck(request)


def _error(kind: str, message: str) -> Json:
    return {"error": {"kind": kind, "message": message[:_MOST_MESSAGE]}}


def _run_statements(connection: SqlEngine, request: Json) -> Json:
    statements = connection.split(request["query"])
    if not statements:
        raise Refused("the query is empty")
    if request["single"] and len(statements) > 1:
        raise Refused(f"one statement at a time, please; there are {len(statements)}")
    if len(statements) > _MOST_STATEMENTS:
        raise Refused(f"there are {len(statements)} statements; at most {_MOST_STATEMENTS}")
    result: Json = {}
    for statement in statements:
        columns, rows = connection.execute(statement)
        result = {"columns": columns, "changed": connection.changed}
        result |= _collect(rows, request, connection.errors)
    return result


def _collect(
    rows: Iterable[Sequence[Any]], request: Json, errors: tuple[type[BaseException], ...]
) -> Json:
    """Rows within the limits, and how many there are in all, as far as they can be counted."""
    kept: list[list[Any]] = []
    size = total = 0
    room = counted = True
    try:
        for row in itertools.islice(rows, _MOST_COUNTED):
            total += 1
            if not room:
                continue
            encoded = [_encoded(value, request["max_cell"]) for value in row]
            size += len(json.dumps(encoded))
            room = len(kept) < request["max_rows"] and size <= request["max_bytes"]
            if room:
                kept.append(encoded)
    except errors:
        if room:
            raise
        counted = False  # the rows to show are complete; only counting the rest took too long
    return {"rows": kept, "total": total, "counted": counted and total < _MOST_COUNTED}


def _encoded(value: Any, longest: int | None, depth: int = 0) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"f": str(value)}
    if isinstance(value, str):
        text = value.encode("utf-8", "backslashreplace").decode()
        return text if longest is None or len(text) <= longest else {"c": [text[:longest], len(text)]}
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        return {"b": [len(data), data[:16].hex(), hashlib.sha256(data).hexdigest()]}
    if isinstance(value, Decimal):
        return {"n": str(value)}
    if isinstance(value, (list, tuple, dict)) and depth >= _DEEPEST:
        raise Refused(f"a value is nested more than {_DEEPEST} deep")
    if isinstance(value, (list, tuple)):
        return {"l": [_encoded(item, longest, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {
            "o": [
                [_encoded(key, longest, depth + 1), _encoded(item, longest, depth + 1)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, (date, time)):
        return {"x": value.isoformat()}
    return {"x": str(value)}


def database_path(request: Json) -> str | None:
    """The database file to open: the original, or the session's own copy, made when first needed.

    The copy is in the session's home, whatever its working directory.
    """
    if request["scratch"] is None:
        return None if request["path"] is None else str(request["path"])
    scratch = Path(os.environ.get("HOME", "."), request["scratch"])
    if request["path"] is not None and not scratch.exists():
        half = scratch.with_name(f".{scratch.name}.half")  # a full disk must not leave half a database
        shutil.copyfile(request["path"], half)
        half.replace(scratch)
    return str(scratch)
