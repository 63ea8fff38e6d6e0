"""Whether two query results are the same. Pure, and over values that left their databases long ago."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any

from ludus.sandbox.sql import Blob, LongText
from ludus.sandbox.sql.results import Row, Value

_MOST_ORDERS = 50
_MOST_STEPS = 10_000
_MOST_SEARCHED = 500
_NUMBER, _BLOB, _LONG = "number", "blob", "long text"
_WORDS = re.compile(
    r"""'[^']*+'? | "[^"]*+"? | `[^`]*+`? | \[[^\]]*+\]?
    | --[^\n]*+ | /\*[^*]*+(?:\*(?!/)[^*]*+)*(?:\*/)?
    | [A-Za-z_][A-Za-z_0-9]*+ | [()] | .""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class TableRules:
    """What counts as the same table."""

    ordered: bool = False
    """The rows must come in the same order."""
    column_order: bool = True
    """The columns must come in the same order; otherwise any one-to-one assignment will do."""
    column_names: bool = False
    """The columns must be called the same, whatever their case."""
    tolerance: float = 1e-6
    """How far two numbers may be apart, relatively, or absolutely near 0, when one of them is a float."""


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A result as it is compared."""

    columns: Sequence[str]
    rows: Sequence[Row]


def same_tables(one: ResultTable, other: ResultTable, rules: TableRules) -> bool:
    """Whether two results agree: as sequences or as multisets of rows, duplicates counted."""
    if len(one.columns) != len(other.columns) or len(one.rows) != len(other.rows):
        return False
    if rules.column_order:
        names_agree = not rules.column_names or _lowered(one.columns) == _lowered(other.columns)
        return names_agree and _same_rows(one.rows, other.rows, rules)
    return any(
        _same_rows(one.rows, [tuple(row[i] for i in order) for row in other.rows], rules)
        for order in islice(_orders(one, other, rules), _MOST_ORDERS)
    )


def is_ordered(query: str) -> bool:
    """Whether the query has ORDER BY at its top level, outside parentheses, strings and comments."""
    depth, before = 0, ""
    for match in _WORDS.finditer(query):
        word = match.group().lower()
        if word in ("(", ")"):
            depth += 1 if word == "(" else -1
        if word.isspace() or word.startswith(("--", "/*")):
            continue
        if depth == 0 and before == "order" and word == "by":
            return True
        before = word
    return False


def _orders(one: ResultTable, other: ResultTable, rules: TableRules) -> Iterator[tuple[int, ...]]:
    """Assignments of `other`'s columns to `one`'s that are worth a try: each pair agrees by itself."""
    width = len(one.columns)
    ours, theirs = ([_profile(table.rows, i) for i in range(width)] for table in (one, other))
    wanted, found = _lowered(one.columns), _lowered(other.columns)
    choices = [
        [
            j
            for j in range(width)
            if (not rules.column_names or wanted[i] == found[j])
            and _may_agree(ours[i], theirs[j], rules)
        ]
        for i in range(width)
    ]
    return _assignments(choices) if _is_perfect(choices) else iter(())


def _profile(rows: Sequence[Row], column: int) -> tuple[Counter[Any], list[float]]:
    """What two columns that agree have in common, in whatever order: their values, and their numbers."""
    values = [row[column] for row in rows]
    return Counter(map(_shape, values)), sorted(n for value in values for n in _numbers(value))


def _may_agree(one: Any, other: Any, rules: TableRules) -> bool:
    return one[0] == other[0] and all(
        _close(a, b, rules.tolerance) for a, b in zip(one[1], other[1], strict=True)
    )


def _assignments(choices: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """All ways to choose a different column for each, as far as a bounded search finds them."""
    pending: list[tuple[int, ...]] = [()]
    for _ in range(_MOST_STEPS):
        if not pending:
            return
        taken = pending.pop()
        if len(taken) == len(choices):
            yield taken
            continue
        pending += [(*taken, j) for j in reversed(choices[len(taken)]) if j not in taken]


def _same_rows(one: Sequence[Row], other: Sequence[Row], rules: TableRules) -> bool:
    if rules.ordered:
        return all(_same_row(a, b, rules.tolerance) for a, b in zip(one, other, strict=True))
    ours, theirs = _grouped(one), _grouped(other)
    return ours.keys() == theirs.keys() and all(
        len(rows) == len(theirs[shape]) and _paired(rows, theirs[shape], rules.tolerance)
        for shape, rows in ours.items()
    )


def _grouped(rows: Sequence[Row]) -> dict[Any, list[Row]]:
    """Rows by all of them that is no number: only rows of one group can be the same."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(_shape(row), []).append(row)
    return groups


def _paired(one: list[Row], other: list[Row], tolerance: float) -> bool:
    """Whether rows can be paired so that the numbers of each pair agree.

    Sorting pairs them unless numbers that agree within the tolerance sort differently on the two sides;
    then the pairs are searched for (augmenting paths), in groups of a size for which that is quick.
    """
    one, other = sorted(one, key=_numbers), sorted(other, key=_numbers)
    if all(_same_row(a, b, tolerance) for a, b in zip(one, other, strict=True)):
        return True
    return len(one) <= _MOST_SEARCHED and _is_perfect(
        [[j for j, b in enumerate(other) if _same_row(a, b, tolerance)] for a in one]
    )


def _is_perfect(choices: Sequence[Sequence[int]]) -> bool:
    """Whether every row can have a partner of its own."""
    partner: dict[int, int] = {}
    for row in range(len(choices)):
        came_from: dict[int, int] = {}
        queue, end = [row], None
        while queue and end is None:
            current = queue.pop()
            for candidate in choices[current]:
                if candidate in came_from:
                    continue
                came_from[candidate] = current
                if candidate not in partner:
                    end = candidate
                    break
                queue.append(partner[candidate])
        if end is None:
            return False
        while end is not None:
            holder = came_from[end]
            previous = next((column for column, mine in partner.items() if mine == holder), None)
            partner[end] = holder
            end = previous if holder != row else None
    return True


def _same_row(one: Value, other: Value, tolerance: float) -> bool:
    """The same for a row, a list inside it, or a single value."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(
            _same_row(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    if _is_number(one) and _is_number(other):
        return _close(one, other, tolerance)
    return bool(_shape(one) == _shape(other))


def _close(one: Any, other: Any, tolerance: float) -> bool:
    if bool(one == other):
        return True
    if not isinstance(one, float) and not isinstance(other, float):
        return False
    first, second = _float(one), _float(other)
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    if math.isinf(first) or math.isinf(second):
        return False  # they are not equal, as was just seen; one may be an integer beyond all floats
    return math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _shape(value: Value) -> Any:
    """A value with every number in it replaced by a mark; two values that agree have the same."""
    if isinstance(value, tuple):
        return tuple(_shape(item) for item in value)
    if _is_number(value):
        return _NUMBER
    if isinstance(value, Blob):
        return (_BLOB, value.size, value.digest)
    if isinstance(value, LongText):
        return (_LONG, value.start, value.length)
    return (type(value).__name__, value)


def _numbers(value: Value) -> tuple[float, ...]:
    """The numbers in a value, in order, for sorting."""
    if isinstance(value, tuple):
        return tuple(number for item in value for number in _numbers(item))
    if not _is_number(value):
        return ()
    number = _float(value)
    return (math.inf if math.isnan(number) else number,)


def _float(number: Any) -> float:
    """A number as a float, also one that has none."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _lowered(names: Sequence[str]) -> list[str]:
    return [name.lower() for name in names]
