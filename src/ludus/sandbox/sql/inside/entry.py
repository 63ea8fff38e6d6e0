"""One SQL request from stdin, one JSON answer to stdout.

The modules of this package are sent to the sandbox as text, and import the standard library (and
duckdb) only. They run no Python of a model's, only its SQL, and harden the engines against that:
read-only connections, an authorizer, no attached files, no extensions, bounds on time, memory, values
and rows. The sandbox bounds whatever that misses.

Values leave as JSON: null, booleans, numbers and text as they are; everything else as an object with
one key: "f" a float that is not finite, "b" a blob (size, first bytes, digest), "n" a decimal, "c" the
beginning of a long text and its length, "l" a list, "o" pairs of a map, "x" the text of anything else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ludus.sandbox.sql.inside.values import Broken, Json, Refused, collect

_MOST_STATEMENTS = 100
_MOST_MESSAGE = 600


class Engine(Protocol):
    """A connection that keeps itself safe from the statements it is given."""

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
    """Answer the request on stdin. What an engine itself prints, such as a progress bar, goes to stderr."""
    request = json.loads(sys.stdin.read())
    out = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(out, "w", encoding="utf-8") as file:
        file.write(json.dumps(answer(request)) + "\n")


def answer(request: Json) -> Json:
    """The result of a request, or its error; `failure` when the database is at fault."""
    try:
        connection = _connected(request)
    except Broken as error:
        return {"failure": str(error)[:_MOST_MESSAGE]}
    try:
        if request["what"] == "schema":
            return {"tables": connection.schema()}
        return _run(connection, request)
    except Refused as error:
        return _error("refused", str(error))
    except MemoryError:
        return _error("memory", "the query needs more memory than it may have")
    except connection.errors as error:
        kind, message = connection.explain(error)
        return _error(kind, message)
    except Exception as error:  # noqa: BLE001 - the database is fine, so it is the query's doing
        return _error("crash", f"{type(error).__name__}: {error}")


def _connected(request: Json) -> Engine:
    """Only the engine that is asked for has been sent along."""
    if request["engine"] == "sqlite":
        from ludus.sandbox.sql.inside.sqlite_engine import Sqlite

        return Sqlite(request)
    from ludus.sandbox.sql.inside.duckdb_engine import Duck

    return Duck(request)


def _error(kind: str, message: str) -> Json:
    return {"error": {"kind": kind, "message": message[:_MOST_MESSAGE]}}


def _run(connection: Engine, request: Json) -> Json:
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
        result |= collect(rows, request, connection.errors)
    return result
