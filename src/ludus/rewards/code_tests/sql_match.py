"""`sql_match`: does the predicted query give the same rows as the gold one?

Each query runs in a separate execution, read-only, on the same database, or on several: a query that is
right by luck on one is seldom right on all. Results are compared here, outside the sandbox.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.remote.threads import run_sync
from ludus.rewards.code_tests.fault_attribution import (
    BrokenTask,
    SandboxedReward,
    SandboxFactory,
    gold_slots,
)
from ludus.rewards.code_tests.test_cases import code_of
from ludus.rewards.scores import EXECUTION, Parts
from ludus.sandbox import Sandbox
from ludus.sandbox.sql import (
    Blob,
    Database,
    LongText,
    QueryResult,
    Row,
    SqlEngineName,
    SqlLimits,
    Value,
    run_query,
)

_log = logging.getLogger(__name__)

_MOST_SANDBOXES = 8
_LANGUAGES = ("sql", "sqlite", "duckdb", "postgresql", "mysql")


@dataclass(kw_only=True, eq=False)
class SqlMatch(SandboxedReward):
    """1 if the answer's query gives the gold query's result on every database, 0 otherwise.

    The gold query is the task's metadata under `key`, or its target. Databases are the task's metadata
    under `database` (one or a list), or `database` here; relative paths start at `folder`. Rows are
    compared as multisets, or in order when the gold query has ORDER BY at its top level (`order="auto"`).
    The part `<name>_ran` says whether the predicted query ran at all.
    """

    control_answer = "select 1"

    database: str | list[str] | None = None
    folder: str = "."
    engine: SqlEngineName | None = None
    key: str = "query"
    order: Literal["auto", "always", "never"] = "auto"
    column_order: bool = True
    column_names: bool = False
    tolerance: float = 1e-6
    seconds: float = 10.0
    max_rows: int = 20_000
    name: str = "sql_match"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits = SqlLimits(seconds=self.seconds, max_rows=self.max_rows)
        self._folder = Path(self.folder)
        self._readable_paths: set[tuple[str, ...]] = set()
        if self.database is not None:
            self._databases(self.database)

    async def _score_answer(self, task: Task, answer: str, sandboxes: SandboxFactory) -> Parts:
        predicted = code_of(answer, _LANGUAGES)
        gold = task.metadata.get(self.key, task.target)
        if not isinstance(gold, str) or not gold.strip():
            raise BrokenTask(f"the task has no gold query: neither metadata {self.key!r} nor a target")
        has_run, is_same, seconds = True, True, 0.0
        for database in self._databases(task.metadata.get("database", self.database)):
            sandbox = await self._sandbox(sandboxes, self._readable(database))
            wanted = await self._gold(sandbox, database, gold)
            found = await run_query(sandbox, database, predicted, self.limits)
            seconds += found.seconds
            has_run = found.ok and found.columns is not None
            if not has_run:
                _log.debug("the query does not run on %s: %s", database.path.name, found.message)
            is_same = has_run and await self._is_same(gold, wanted, found)
            if not is_same:
                break
        return {self.name: float(is_same), f"{self.name}_ran": float(has_run), EXECUTION: seconds}

    async def _gold(self, sandbox: Sandbox, database: Database, gold: str) -> QueryResult:
        """The gold query's result. Where it fails, it runs again in a sandbox that no other episode uses."""
        wanted = await run_query(sandbox, database, gold, self.limits)
        if not _is_usable(wanted):
            alone = sandbox.config.model_copy(update={"workers": 1})
            async with gold_slots(), Sandbox(alone) as fresh:
                wanted = await run_query(fresh, database, gold, self.limits)
        if not _is_usable(wanted):
            why = wanted.message or "it gives no rows, or too many"
            raise BrokenTask(f"the gold query cannot be used on {database.path.name}: {why}")
        return wanted

    async def _is_same(self, gold: str, wanted: QueryResult, found: QueryResult) -> bool:
        ordered = self.order == "always" or (self.order == "auto" and is_ordered(gold))
        rules = TableRules(ordered, self.column_order, self.column_names, self.tolerance)
        if not found.complete:
            return False
        return await run_sync(equal_tables, wanted, found, rules)

    def _databases(self, given: Any) -> list[Database]:
        several = [given] if isinstance(given, str) else given
        if not isinstance(several, list | tuple) or not several:
            raise ConfigError(
                f"{self.name!r} needs a database: give one here, or in each task's metadata as 'database'"
            )
        return [Database.of(self._folder / str(one), self.engine) for one in several]

    def _readable(self, database: Database) -> tuple[str, ...]:
        """Paths that the sandbox must see: the folder, so that its databases share a sandbox, or the file."""
        folder = self._folder.resolve()
        if not database.readable:
            return ()
        if self._folder != Path() and database.path.is_relative_to(folder):
            return (str(folder),)
        self._readable_paths.add(database.readable)
        if len(self._readable_paths) > _MOST_SANDBOXES:
            raise ConfigError(
                f"{self.name!r}: the tasks use more than {_MOST_SANDBOXES} databases, each with a sandbox "
                "of its own; give the folder that they are all in as 'folder'"
            )
        return database.readable


def _is_usable(result: QueryResult) -> bool:
    return result.ok and result.columns is not None and result.complete


# Comparing tables: pure functions over values that have left the sandbox.

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
    ordered: bool = False
    """The rows must come in the same order."""
    column_order: bool = True
    """The columns must come in the same order; otherwise any one-to-one assignment will do."""
    column_names: bool = False
    """The columns must be called the same, whatever their case."""
    tolerance: float = 1e-6
    """How far two numbers may be apart, relatively, or absolutely near 0, when one of them is a float."""


def equal_tables(one: QueryResult, other: QueryResult, rules: TableRules) -> bool:
    """Whether two results agree: as sequences or as multisets of rows, duplicates counted."""
    names, others = _lowered(one.columns), _lowered(other.columns)
    if len(names) != len(others) or len(one.rows) != len(other.rows):
        return False
    if rules.column_order:
        return (not rules.column_names or names == others) and _same_rows(one.rows, other.rows, rules)
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


def _orders(one: QueryResult, other: QueryResult, rules: TableRules) -> Iterator[tuple[int, ...]]:
    """Assignments of `other`'s columns to `one`'s that are worth a try: each pair agrees by itself."""
    wanted, found = _lowered(one.columns), _lowered(other.columns)
    width = len(wanted)
    ours, theirs = ([_profile(table.rows, i) for i in range(width)] for table in (one, other))
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
    """Order-free profile of a column, alike for equal columns: counts of its values, and its sorted numbers."""
    values = [row[column] for row in rows]
    return Counter(map(_shape, values)), sorted(n for value in values for n in _numbers(value))


def _may_agree(one: Any, other: Any, rules: TableRules) -> bool:
    return one[0] == other[0] and all(
        _close_numbers(a, b, rules.tolerance) for a, b in zip(one[1], other[1], strict=True)
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
    """Rows by all their values except numbers: only rows of one group can be equal."""
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
    """Whether every row can be paired with a different partner (bipartite matching by augmenting paths)."""
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
    """Equality within the tolerance of two rows, lists inside them, or single values."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(
            _same_row(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    if _is_number(one) and _is_number(other):
        return _close_numbers(one, other, tolerance)
    return bool(_shape(one) == _shape(other))


def _close_numbers(one: Any, other: Any, tolerance: float) -> bool:
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
    """A value with every number in it replaced by a mark; equal values have the same shape."""
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


def _lowered(names: Sequence[str] | None) -> list[str]:
    return [name.lower() for name in names or ()]
