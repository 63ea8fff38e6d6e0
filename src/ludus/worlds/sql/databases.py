"""Eleven small databases, made on the spot and the same on every machine, and questions about them.

`databases.toml` has the tables, and the forms of questions: wordings and a query. Here is which columns, values
and bounds a form is asked about. A question stays only if its result is not empty, short and, where it asks for
a single thing, unambiguous.
"""

from __future__ import annotations

import sqlite3
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from itertools import combinations, pairwise, permutations
from pathlib import Path
from random import Random
from typing import Any, Literal

from ludus.core.random import key

_LISTED: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_WORDS: Mapping[str, str] = _LISTED["words"]
NAMES = tuple(_LISTED["databases"])
HELD_OUT = ("cinema", "league", "observatory")
"""No training question is about one of these."""
VARIANTS = 4
"""How often a schema is filled with other data, for training: `library-1` to `library-4`."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column by what it holds. `phrase` is what questions call it."""

    name: str
    kind: str
    """person, title, category, number, date or reference."""
    phrase: str
    values: tuple[str, ...] = ()
    """The categories, or the table that a reference leads to."""
    low: int = 0
    high: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its name, what one of its rows is called, and several."""

    name: str
    one: str
    size: int
    columns: tuple[Column, ...]

    @property
    def label(self) -> Column | None:
        return next((c for c in self.columns if c.kind in ("person", "title")), None)

    def of(self, kind: str) -> list[Column]:
        """Its columns of a kind."""
        return [column for column in self.columns if column.kind == kind]


@cache
def schema_of(name: str) -> tuple[Table, ...]:
    """The tables of a database, such as `library-2`."""
    return tuple(
        Table(
            many,
            row["one"],
            row["rows"],
            tuple(_column(text.format(**_WORDS)) for text in row["columns"]),
        )
        for many, row in _LISTED["databases"][name.partition("-")[0]].items()
    )


def _column(text: str) -> Column:
    """A column as it is listed: name, kind, what it holds, and in brackets what it is called."""
    body, _, phrase = text.rstrip(")").partition(" (")
    name, kind, *rest = body.split()
    low, high = map(int, rest) if kind == "number" else (0, 0)
    called = phrase or name.removesuffix("_id").replace("_", " ")
    return Column(name, kind, called, tuple(rest), low, high)


@cache
def script_of(name: str) -> str:
    """The SQL that makes a database."""
    draw, lines = Random(key("sql", name)), list[str]()
    for table in schema_of(name):
        columns = ["id integer primary key"]
        for column in table.columns:
            kind = "integer" if column.kind in ("number", "reference") else "text"
            more = f" references {column.values[0]}(id)" if column.kind == "reference" else ""
            columns.append(f"{column.name} {kind}{more}")
        lines.append(f"create table {table.name}({', '.join(columns)});")
        labels = _labels(table, draw)
        for number in range(1, table.size + 1):
            values = [str(number)]
            for column in table.columns:
                values.append(_value(name, column, labels[number - 1], draw))
            lines.append(f"insert into {table.name} values ({', '.join(values)});")
    return "\n".join(lines)


def _labels(table: Table, draw: Random) -> list[str]:
    """Names, each once."""
    label = table.label
    one, other = ("first", "last") if label is not None and label.kind == "person" else ("which", "what")
    names = [f"{a} {b}" for a in _WORDS[one].split() for b in _WORDS[other].split()]
    draw.shuffle(names)
    return names[: table.size]


def _value(database: str, column: Column, label: str, draw: Random) -> str:
    if column.kind == "number":
        return str(draw.randint(column.low, column.high))
    if column.kind == "category":
        return f"'{draw.choice(column.values)}'"
    if column.kind == "date":
        return f"'{date(2019, 1, 1) + timedelta(days=draw.randrange(5 * 365))}'"
    if column.kind == "reference":
        size = next(table.size for table in schema_of(database) if table.name == column.values[0])
        return str(draw.randint(1, size - 1))  # the last one has none
    return f"'{label}'"


# Questions

_MOST_ROWS = 30
_AGGREGATES = {"avg": "average", "sum": "total", "max": "highest", "min": "lowest"}
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
_FORMS: Mapping[str, Any] = _LISTED["forms"]


@dataclass(frozen=True, slots=True)
class SqlQuestion:
    """A question and the query that answers it."""

    subtask: str
    text: str
    query: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """A form with all that its wordings and its query speak of."""

    form: str
    about: Mapping[str, Any]

    @property
    def wordings(self) -> list[str]:
        return [text.format(**self.about) for text in _FORMS[self.form]["texts"]]

    @property
    def query(self) -> str:
        return str(_FORMS[self.form]["query"].format(**self.about))

    def question(self, text: str) -> SqlQuestion:
        return SqlQuestion(_FORMS[self.form]["subtask"], text, self.query)


def _ask(form: str, **about: Any) -> _Asked:
    return _Asked(form, about)


@cache
def questions(name: str) -> tuple[SqlQuestion, ...]:
    """The questions about a database whose gold queries give something to compare."""
    draw = Random(key("sql", name, "questions"))
    found: dict[str, SqlQuestion] = {}
    connection = sqlite3.connect(":memory:")
    connection.executescript(script_of(name))
    for table in schema_of(name):
        for asked in _about(name, table, draw):
            one = asked.question(asked.wordings[0])
            rows = connection.execute(one.query).fetchall()
            is_fine = 1 <= len(rows) <= _MOST_ROWS and rows != [(None,)]
            if is_fine and _is_unambiguous(connection, one.query):
                found.setdefault(one.text, one)
    connection.close()
    return tuple(found.values())


def _is_unambiguous(connection: sqlite3.Connection, query: str) -> bool:
    """Whether what a limit cuts off differs from what it keeps, in the number that was ordered by."""
    head, _, limit = query.partition(" limit ")
    if not limit:
        return True
    values = [row[-1] for row in connection.execute(head).fetchall()[: int(limit) + 1]]
    return len(set(values)) == len(values)


def _about(name: str, table: Table, draw: Random) -> Iterator[_Asked]:
    yield from _filters(table, draw)
    yield from _aggregates(table, draw)
    yield from _orders(table)
    yield from _groups(table, draw)
    yield from _dates(table, draw)
    references = _references(name, table)
    for reference, parent in references:
        yield from _joins(table, reference, parent, draw)
        for right, other in references:
            if right is not reference:
                c = other.of("category")[0]
                joined = _joined(table, (reference, parent), (right, other))
                value = draw.choice(c.values)
                yield _ask("two_owners", t=table, p=parent, other=other, c=c, value=value, joined=joined)


def _references(name: str, table: Table) -> list[tuple[Column, Table]]:
    """The columns that refer to other tables, and these."""
    tables = {one.name: one for one in schema_of(name)}
    return [(column, tables[column.values[0]]) for column in table.of("reference")]


def _joined(table: Table, *references: tuple[Column, Table]) -> str:
    """The table with those that it refers to."""
    joins = [f"join {p.name} on {table.name}.{column.name} = {p.name}.id" for column, p in references]
    return " ".join([table.name, *joins])


def _filters(t: Table, draw: Random) -> Iterator[_Asked]:
    for c in t.of("category"):
        for value in draw.sample(c.values, 2):
            yield _ask("filter_count", t=t, c=c, value=value)
    for n in t.of("number") if t.label else ():
        bound = draw.randint(n.low + (n.high - n.low) // 2, n.high - (n.high - n.low) // 5)
        yield _ask("filter_above", t=t, n=n, bound=bound)
        yield _ask("above_average", t=t, n=n)


def _aggregates(t: Table, draw: Random) -> Iterator[_Asked]:
    for n in t.of("number"):
        for function, word in _AGGREGATES.items():
            yield _ask("aggregate", t=t, n=n, function=function, word=word)
        for c in t.of("category"):
            function, value = draw.choice(list(_AGGREGATES)), draw.choice(c.values)
            word = _AGGREGATES[function]
            yield _ask("aggregate_of_category", t=t, n=n, c=c, value=value, function=function, word=word)


def _orders(t: Table) -> Iterator[_Asked]:
    for n in t.of("number") if t.label else ():
        for word, order in (("highest", " desc"), ("lowest", "")):
            yield _ask("first", t=t, n=n, word=word, order=order)
            yield _ask("first_three", t=t, n=n, word=word, order=order)


def _groups(t: Table, draw: Random) -> Iterator[_Asked]:
    for c in t.of("category"):
        yield _ask("group_count", t=t, c=c)
        bound = max(1, t.size // len(c.values) + draw.randint(-1, 1))
        yield _ask("group_above", t=t, c=c, bound=bound)
        for n in t.of("number"):
            yield _ask("group_average", t=t, c=c, n=n)


def _dates(t: Table, draw: Random) -> Iterator[_Asked]:
    for d in t.of("date"):
        for year in draw.sample(range(2019, 2024), 2):
            yield _ask("in_year", t=t, d=d, year=year)
            month = draw.randint(1, 12)
            called = _MONTHS[month - 1]
            yield _ask("in_month", t=t, d=d, year=year, month=month, month_name=called)
        for function, word in (("min", "first"), ("max", "last")):
            yield _ask("first_day", t=t, d=d, function=function, word=word)
        for n in t.of("number"):
            day = date(2019, 7, 1) + timedelta(days=draw.randrange(3 * 365))
            yield _ask("total_after", t=t, d=d, n=n, day=day)


def _joins(t: Table, reference: Column, p: Table, draw: Random) -> Iterator[_Asked]:
    tables: dict[str, Any] = {"t": t, "p": p, "joined": _joined(t, (reference, p))}
    if p.label is not None:
        yield _ask("owned", **tables)
        yield _ask("owns_most", **tables)
        yield _ask("owns_none", **tables, reference=reference)
        yield _ask("owns_above", **tables, bound=max(1, t.size // p.size + draw.randint(0, 2)))
    for c in p.of("category"):
        for value in draw.sample(c.values, 2):
            yield _ask("owner_count", **tables, c=c, value=value)
        for n in t.of("number"):
            function, value = draw.choice(("avg", "sum", "max")), draw.choice(c.values)
            word = _AGGREGATES[function]
            yield _ask("owner_aggregate", **tables, c=c, n=n, value=value, function=function, word=word)
        for d in t.of("date"):
            year, value = draw.randrange(2019, 2024), draw.choice(c.values)
            yield _ask("owner_in_year", **tables, c=c, d=d, value=value, year=year)
    for n in p.of("number") if t.label else ():
        bound = draw.randint(n.low + (n.high - n.low) // 2, n.high)
        yield _ask("owner_above", **tables, n=n, bound=bound)


CHECKED_ON = (5, 6)
"""Variants of a database that no task shows; a question is asked if its gold query gives rows on them too."""
_YEARS = range(2019, 2024)
_DRAWS = 3
"""Questions of a form that names values or years."""

Split = Literal["train", "held_out"]


@cache
def hard_questions(name: str, split: Split) -> tuple[SqlQuestion, ...]:
    """Questions of two steps about a database, such as `library-2`, in the wordings of a split.

    The forms above are the same in both splits, so a model that has imitated them answers nearly all. These
    need a subquery for each row, a set difference or a comparison of aggregates, and the held-out ones are
    worded as no training question is. Answers are compared on databases with other rows too (`CHECKED_ON`).
    """
    draw = Random(key("sql", name, "hard questions"))
    own = name.partition("-")[0]
    found: dict[str, SqlQuestion] = {}
    with ExitStack() as stack:
        connections = []
        for checked in (name, *(f"{own}-{n}" for n in CHECKED_ON)):
            connections.append(stack.enter_context(closing(sqlite3.connect(":memory:"))))
            connections[-1].executescript(script_of(checked))
        for asked in _hard_forms(name, draw):
            wordings = asked.wordings
            text = wordings[2] if split == "held_out" else draw.choice(wordings[:2])
            if _can_be_checked([one.execute(asked.query).fetchall() for one in connections]):
                found.setdefault(text, asked.question(text))
    return tuple(found.values())


def _can_be_checked(results: Sequence[list[tuple[object, ...]]]) -> bool:
    """Whether a query gives a few rows on each database, and not the same on all."""
    is_fine = all(1 <= len(rows) <= _MOST_ROWS and (None,) not in rows for rows in results)
    return is_fine and any(rows != results[0] for rows in results[1:])


def _hard_forms(name: str, draw: Random) -> Iterator[_Asked]:
    for table in schema_of(name):
        yield from _within_categories(table)
        yield from _years(table, draw)
        references = _references(name, table)
        for reference, parent in references:
            yield from _shares(table, reference, parent, draw)
            yield from _sets(table, reference, parent, draw)
            for n in table.of("number") if parent.label else ():
                joined = _joined(table, (reference, parent))
                yield _ask("owners_above", t=table, p=parent, n=n, joined=joined)
        for one, other in pairwise(references):
            yield from _pairs(table, one, other)


def _within_categories(t: Table) -> Iterator[_Asked]:
    if t.label is None:
        return
    for c in t.of("category"):
        for n in t.of("number"):
            yield _ask("above_category", t=t, c=c, n=n)
            yield _ask("top_of_category", t=t, c=c, n=n)
    for n in t.of("number"):
        yield _ask("second", t=t, n=n)


def _years(t: Table, draw: Random) -> Iterator[_Asked]:
    for d in t.of("date"):
        for first, second in draw.sample(list(combinations(_YEARS, 2)), _DRAWS):
            yield _ask("difference", t=t, d=d, first=first, second=second)
        yield _ask("share_of_year", t=t, d=d)
        for n in t.of("number"):
            yield _ask("years_above", t=t, d=d, n=n)


def _shares(t: Table, reference: Column, p: Table, draw: Random) -> Iterator[_Asked]:
    joined = _joined(t, (reference, p))
    for c in p.of("category"):
        for value in draw.sample(c.values, min(_DRAWS, len(c.values))):
            yield _ask("share_of_owner", t=t, p=p, joined=joined, c=c, value=value)
        group = f"{p.name}.{c.name}"
        for n in t.of("number"):
            total = f"select {group} as k, sum({t.name}.{n.name}) as s from {joined} group by {group}"
            yield _ask("highest_total", t=t, p=p, c=c, n=n, total=total)


def _sets(t: Table, reference: Column, p: Table, draw: Random) -> Iterator[_Asked]:
    if p.label is None:
        return
    of = f"select {reference.name} from {t.name} where"
    for d in t.of("date"):
        year, owners = f"{of} strftime('%Y', {d.name})", p.name.capitalize()
        for first, second in draw.sample(list(permutations(_YEARS, 2)), _DRAWS):
            about = {"d": d, "first": first, "second": second, "owners": owners}
            yield _ask("one_year_only", t=t, p=p, of=year, **about)
    for c in t.of("category"):
        for left, right in draw.sample(list(combinations(c.values, 2)), _DRAWS):
            yield _ask("both_categories", t=t, p=p, of=f"{of} {c.name}", c=c, first=left, second=right)


def _pairs(t: Table, one: tuple[Column, Table], other: tuple[Column, Table]) -> Iterator[_Asked]:
    joined = _joined(t, one, other)
    first, second = one[1], other[1]
    for a in first.of("category"):
        for b in second.of("category"):
            columns = f"{first.name}.{a.name}, {second.name}.{b.name}"
            yield _ask("pair", t=t, p=first, other=second, a=a, b=b, joined=joined, columns=columns)
