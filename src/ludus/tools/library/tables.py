"""Query results and schemas as text for a model: aligned, compact, and of a bounded width."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from ludus.sandbox.sql import Blob, LongText, QueryResult, Table
from ludus.sandbox.sql.results import Value

_WIDEST = 60
_LINE_BREAKS = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0", "\x1b": "\\x1b"})


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


def described(tables: Sequence[Table], only: str | None = None) -> str:
    """Tables, one per line: columns with types, keys, and what they refer to."""
    lines: list[str] = []
    for table in tables:
        if only is not None and table.name.lower() != only.lower():
            continue
        columns = ", ".join(_column(table, position) for position in range(len(table.columns)))
        kind = "" if table.kind == "table" else f" -- {table.kind}"
        lines.append(f"{_short(table.name)}({columns}){kind}")
    return "\n".join(lines)


def _column(table: Table, position: int) -> str:
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
