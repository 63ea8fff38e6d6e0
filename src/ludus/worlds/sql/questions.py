"""Questions about the databases, from templates over whatever tables one has, with their gold queries.

One stays only if its result is not empty, short and, where it asks for a single thing, unambiguous.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from random import Random

from ludus.core.random import key
from ludus.worlds.sql.databases import Column, Table, schema_of, script_of

_MOST_ROWS = 30
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


@dataclass(frozen=True, slots=True)
class SqlQuestion:
    """A question and the query that answers it."""

    subtask: str
    text: str
    query: str


@cache
def questions(name: str) -> tuple[SqlQuestion, ...]:
    """The questions about a database whose gold queries give something to compare."""
    draw = Random(key("sql", name, "questions"))
    found: dict[str, SqlQuestion] = {}
    connection = sqlite3.connect(":memory:")
    connection.executescript(script_of(name))
    for table in schema_of(name):
        for one in _about(name, table, draw):
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


def _about(name: str, table: Table, draw: Random) -> Iterator[SqlQuestion]:
    yield from _filters(table, draw)
    yield from _aggregates(table, draw)
    yield from _orders(table)
    yield from _groups(table, draw)
    yield from _dates(table, draw)
    parents = {one.name: one for one in schema_of(name)}
    references = table.of("reference")
    for reference in references:
        parent = parents[reference.values[0]]
        yield from _joins(table, reference, parent, draw)
        for other in references:
            if other is not reference:
                yield _double_join(table, (reference, parent), (other, parents[other.values[0]]), draw)


def _filters(table: Table, draw: Random) -> Iterator[SqlQuestion]:
    t, label = table.name, table.label
    for c in table.of("category"):
        for value in draw.sample(c.values, 2):
            text = f"How many {table.many} have the {c.phrase} {value}?"
            yield SqlQuestion("filter", text, f"select count(*) from {t} where {c.name} = '{value}'")
    for n in table.of("number") if label else ():
        assert label is not None
        bound = draw.randint(n.low + (n.high - n.low) // 2, n.high - (n.high - n.low) // 5)
        text = f"Give the {label.phrase} of all {table.many} whose {n.phrase} is above {bound}."
        yield SqlQuestion("filter", text, f"select {label.name} from {t} where {n.name} > {bound}")
        text = (
            f"Give the {label.phrase} of all {table.many} whose {n.phrase} is higher than the average "
            f"{n.phrase} of all {table.many}."
        )
        query = f"select {label.name} from {t} where {n.name} > (select avg({n.name}) from {t})"
        yield SqlQuestion("nested", text, query)


_AGGREGATES = {"avg": "average", "sum": "total", "max": "highest", "min": "lowest"}


def _aggregates(table: Table, draw: Random) -> Iterator[SqlQuestion]:
    for n in table.of("number"):
        for function, word in _AGGREGATES.items():
            text = f"What is the {word} {n.phrase} of all {table.many}?"
            yield SqlQuestion("aggregate", text, f"select {function}({n.name}) from {table.name}")
        for c in table.of("category"):
            function, value = draw.choice(list(_AGGREGATES)), draw.choice(c.values)
            word = _AGGREGATES[function]
            text = f"What is the {word} {n.phrase} of the {table.many} with the {c.phrase} {value}?"
            query = f"select {function}({n.name}) from {table.name} where {c.name} = '{value}'"
            yield SqlQuestion("aggregate", text, query)


def _orders(table: Table) -> Iterator[SqlQuestion]:
    label = table.label
    for n in table.of("number") if label else ():
        assert label is not None
        for word, order in (("highest", " desc"), ("lowest", "")):
            columns = f"select {label.name}, {n.name} from {table.name} order by {n.name}{order}"
            text = f"Which {table.one} has the {word} {n.phrase}? Give its {label.phrase} and its {n.phrase}."
            yield SqlQuestion("order", text, f"{columns} limit 1")
            text = (
                f"Give {label.phrase} and {n.phrase} of the three {table.many} with the {word} {n.phrase}, "
                f"the {word} first."
            )
            yield SqlQuestion("order", text, f"{columns} limit 3")


def _groups(table: Table, draw: Random) -> Iterator[SqlQuestion]:
    t = table.name
    for c in table.of("category"):
        text = f"How many {table.many} are there of each {c.phrase}? Give the {c.phrase} and the number."
        yield SqlQuestion("group", text, f"select {c.name}, count(*) from {t} group by {c.name}")
        bound = max(1, table.size // len(c.values) + draw.randint(-1, 1))
        text = f"Which values of {c.phrase} do more than {bound} {table.many} have?"
        query = f"select {c.name} from {t} group by {c.name} having count(*) > {bound}"
        yield SqlQuestion("group", text, query)
        for n in table.of("number"):
            text = (
                f"What is the average {n.phrase} of the {table.many} for each {c.phrase}? Give the {c.phrase} "
                "and the average."
            )
            yield SqlQuestion(
                "group", text, f"select {c.name}, avg({n.name}) from {t} group by {c.name}"
            )


def _dates(table: Table, draw: Random) -> Iterator[SqlQuestion]:
    t = table.name
    for d in table.of("date"):
        for year in draw.sample(range(2019, 2024), 2):
            text = f"How many {table.many} were {d.phrase} in {year}?"
            yield SqlQuestion(
                "date",
                text,
                f"select count(*) from {t} where {d.name} between '{year}-01-01' and '{year}-12-31'",
            )
            month = draw.randint(1, 12)
            text = f"How many {table.many} were {d.phrase} in {_MONTHS[month - 1]} {year}?"
            query = f"select count(*) from {t} where strftime('%Y-%m', {d.name}) = '{year}-{month:02}'"
            yield SqlQuestion("date", text, query)
        for function, word in (("min", "first"), ("max", "last")):
            text = f"On which day was the {word} {table.one} {d.phrase}?"
            yield SqlQuestion("date", text, f"select {function}({d.name}) from {t}")
        for n in table.of("number"):
            day = date(2019, 7, 1) + timedelta(days=draw.randrange(3 * 365))
            text = f"What is the total {n.phrase} of the {table.many} that were {d.phrase} after {day}?"
            yield SqlQuestion("date", text, f"select sum({n.name}) from {t} where {d.name} > '{day}'")


def _joins(table: Table, reference: Column, parent: Table, draw: Random) -> Iterator[SqlQuestion]:
    t, p, label, named = table.name, parent.name, table.label, parent.label
    joined = f"{t} join {p} on {t}.{reference.name} = {p}.id"
    if named is not None:
        given = f"{p}.{named.name}"
        text = (
            f"How many {table.many} does each {parent.one} have? Give {named.phrase} and number, without those "
            "that have none."
        )
        yield SqlQuestion("join", text, f"select {given}, count(*) from {joined} group by {p}.id")
        text = f"Which {parent.one} has the most {table.many}? Give {named.phrase} and number."
        query = f"select {given}, count(*) from {joined} group by {p}.id order by count(*) desc limit 1"
        yield SqlQuestion("join", text, query)
        text = f"Give the {named.phrase} of all {parent.many} without any {table.many}."
        query = f"select {named.name} from {p} where id not in (select {reference.name} from {t})"
        yield SqlQuestion("nested", text, query)
        bound = max(1, table.size // parent.size + draw.randint(0, 2))
        text = f"Give the {named.phrase} of all {parent.many} with more than {bound} {table.many}."
        yield SqlQuestion(
            "join", text, f"select {given} from {joined} group by {p}.id having count(*) > {bound}"
        )
    for c in parent.of("category"):
        for value in draw.sample(c.values, 2):
            text = f"How many {table.many} are there whose {parent.one} has the {c.phrase} {value}?"
            yield SqlQuestion(
                "join", text, f"select count(*) from {joined} where {p}.{c.name} = '{value}'"
            )
        for n in table.of("number"):
            function, value = draw.choice(("avg", "sum", "max")), draw.choice(c.values)
            whose = f"whose {parent.one} has the {c.phrase} {value}"
            text = f"What is the {_AGGREGATES[function]} {n.phrase} of the {table.many} {whose}?"
            query = f"select {function}({t}.{n.name}) from {joined} where {p}.{c.name} = '{value}'"
            yield SqlQuestion("join", text, query)
        for d in table.of("date"):
            year, value = draw.randrange(2019, 2024), draw.choice(c.values)
            whose = f"whose {parent.one} has the {c.phrase} {value}"
            text = f"How many {table.many} {whose} were {d.phrase} in {year}?"
            in_year = f"strftime('%Y', {t}.{d.name}) = '{year}'"
            query = f"select count(*) from {joined} where {p}.{c.name} = '{value}' and {in_year}"
            yield SqlQuestion("date", text, query)
    for n in parent.of("number") if label is not None else ():
        assert label is not None
        bound = draw.randint(n.low + (n.high - n.low) // 2, n.high)
        text = f"Give the {label.phrase} of all {table.many} whose {parent.one} has a {n.phrase} above {bound}."
        yield SqlQuestion(
            "join", text, f"select {t}.{label.name} from {joined} where {p}.{n.name} > {bound}"
        )


def _double_join(
    table: Table, one: tuple[Column, Table], other: tuple[Column, Table], draw: Random
) -> SqlQuestion:
    (left, first), (right, second) = one, other
    assert first.label is not None
    c = second.of("category")[0]
    value = draw.choice(c.values)
    text = (
        f"Give the {first.label.phrase} of every {first.one} that has a {table.one} whose {second.one} has the "
        f"{c.phrase} {value}, each once."
    )
    query = (
        f"select distinct {first.name}.{first.label.name} from {table.name} "
        f"join {first.name} on {table.name}.{left.name} = {first.name}.id "
        f"join {second.name} on {table.name}.{right.name} = {second.name}.id "
        f"where {second.name}.{c.name} = '{value}'"
    )
    return SqlQuestion("join", text, query)
