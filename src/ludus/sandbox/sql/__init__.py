"""SQL in the sandbox: SQLite and DuckDB, read-only or on a scratch copy, within limits."""

from ludus.sandbox.sql.execution import Database, SqlLimits, read_schema, run_query
from ludus.sandbox.sql.results import Blob, Column, LongText, QueryResult, SqlProblem, Table

__all__ = [
    "Blob",
    "Column",
    "Database",
    "LongText",
    "QueryResult",
    "SqlLimits",
    "SqlProblem",
    "Table",
    "read_schema",
    "run_query",
]
