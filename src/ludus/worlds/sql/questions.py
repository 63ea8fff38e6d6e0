"""Questions about the databases, from templates over whatever tables one has, with their gold queries.

One stays only if its result is not empty, short and, where it asks for a single thing, unambiguous.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from itertools import combinations, pairwise, permutations
from random import Random
from typing import Literal

from ludus.core.random import key
from ludus.worlds.sql.databases import Column, Table, schema_of, script_of

_MOST_ROWS = 30
_MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
]  # fmt: skip


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
            text = f"How many {table.name} have the {c.phrase} {value}?"
            yield SqlQuestion("filter", text, f"select count(*) from {t} where {c.name} = '{value}'")
    for n in table.of("number") if label else ():
        assert label is not None
        bound = draw.randint(n.low + (n.high - n.low) // 2, n.high - (n.high - n.low) // 5)
        text = f"Give the {label.phrase} of all {table.name} whose {n.phrase} is above {bound}."
        yield SqlQuestion("filter", text, f"select {label.name} from {t} where {n.name} > {bound}")
        text = (
            f"Give the {label.phrase} of all {table.name} whose {n.phrase} is higher than the average "
            f"{n.phrase} of all {table.name}."
        )
        query = f"select {label.name} from {t} where {n.name} > (select avg({n.name}) from {t})"
        yield SqlQuestion("nested", text, query)


_AGGREGATES = {"avg": "average", "sum": "total", "max": "highest", "min": "lowest"}


def _aggregates(table: Table, draw: Random) -> Iterator[SqlQuestion]:
    for n in table.of("number"):
        for function, word in _AGGREGATES.items():
            text = f"What is the {word} {n.phrase} of all {table.name}?"
            yield SqlQuestion("aggregate", text, f"select {function}({n.name}) from {table.name}")
        for c in table.of("category"):
            function, value = draw.choice(list(_AGGREGATES)), draw.choice(c.values)
            word = _AGGREGATES[function]
            text = f"What is the {word} {n.phrase} of the {table.name} with the {c.phrase} {value}?"
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
                f"Give {label.phrase} and {n.phrase} of the three {table.name} with the {word} {n.phrase}, "
                f"the {word} first."
            )
            yield SqlQuestion("order", text, f"{columns} limit 3")


def _groups(table: Table, draw: Random) -> Iterator[SqlQuestion]:
    t = table.name
    for c in table.of("category"):
        text = f"How many {table.name} are there of each {c.phrase}? Give the {c.phrase} and the number."
        yield SqlQuestion("group", text, f"select {c.name}, count(*) from {t} group by {c.name}")
        bound = max(1, table.size // len(c.values) + draw.randint(-1, 1))
        text = f"Which values of {c.phrase} do more than {bound} {table.name} have?"
        query = f"select {c.name} from {t} group by {c.name} having count(*) > {bound}"
        yield SqlQuestion("group", text, query)
        for n in table.of("number"):
            text = (
                f"What is the average {n.phrase} of the {table.name} for each {c.phrase}? Give the {c.phrase} "
                "and the average."
            )
            yield SqlQuestion(
                "group", text, f"select {c.name}, avg({n.name}) from {t} group by {c.name}"
            )


def _dates(table: Table, draw: Random) -> Iterator[SqlQuestion]:
    t = table.name
    for d in table.of("date"):
        for year in draw.sample(range(2019, 2024), 2):
            text = f"How many {table.name} were {d.phrase} in {year}?"
            yield SqlQuestion(
                "date",
                text,
                f"select count(*) from {t} where {d.name} between '{year}-01-01' and '{year}-12-31'",
            )
            month = draw.randint(1, 12)
            text = f"How many {table.name} were {d.phrase} in {_MONTHS[month - 1]} {year}?"
            query = f"select count(*) from {t} where strftime('%Y-%m', {d.name}) = '{year}-{month:02}'"
            yield SqlQuestion("date", text, query)
        for function, word in (("min", "first"), ("max", "last")):
            text = f"On which day was the {word} {table.one} {d.phrase}?"
            yield SqlQuestion("date", text, f"select {function}({d.name}) from {t}")
        for n in table.of("number"):
            day = date(2019, 7, 1) + timedelta(days=draw.randrange(3 * 365))
            text = f"What is the total {n.phrase} of the {table.name} that were {d.phrase} after {day}?"
            yield SqlQuestion("date", text, f"select sum({n.name}) from {t} where {d.name} > '{day}'")


def _joins(table: Table, reference: Column, parent: Table, draw: Random) -> Iterator[SqlQuestion]:
    t, p, label, named = table.name, parent.name, table.label, parent.label
    joined = f"{t} join {p} on {t}.{reference.name} = {p}.id"
    if named is not None:
        given = f"{p}.{named.name}"
        text = (
            f"How many {table.name} does each {parent.one} have? Give {named.phrase} and number, without those "
            "that have none."
        )
        yield SqlQuestion("join", text, f"select {given}, count(*) from {joined} group by {p}.id")
        text = f"Which {parent.one} has the most {table.name}? Give {named.phrase} and number."
        query = f"select {given}, count(*) from {joined} group by {p}.id order by count(*) desc limit 1"
        yield SqlQuestion("join", text, query)
        text = f"Give the {named.phrase} of all {parent.name} without any {table.name}."
        query = f"select {named.name} from {p} where id not in (select {reference.name} from {t})"
        yield SqlQuestion("nested", text, query)
        bound = max(1, table.size // parent.size + draw.randint(0, 2))
        text = f"Give the {named.phrase} of all {parent.name} with more than {bound} {table.name}."
        yield SqlQuestion(
            "join", text, f"select {given} from {joined} group by {p}.id having count(*) > {bound}"
        )
    for c in parent.of("category"):
        for value in draw.sample(c.values, 2):
            text = f"How many {table.name} are there whose {parent.one} has the {c.phrase} {value}?"
            yield SqlQuestion(
                "join", text, f"select count(*) from {joined} where {p}.{c.name} = '{value}'"
            )
        for n in table.of("number"):
            function, value = draw.choice(("avg", "sum", "max")), draw.choice(c.values)
            whose = f"whose {parent.one} has the {c.phrase} {value}"
            text = f"What is the {_AGGREGATES[function]} {n.phrase} of the {table.name} {whose}?"
            query = f"select {function}({t}.{n.name}) from {joined} where {p}.{c.name} = '{value}'"
            yield SqlQuestion("join", text, query)
        for d in table.of("date"):
            year, value = draw.randrange(2019, 2024), draw.choice(c.values)
            whose = f"whose {parent.one} has the {c.phrase} {value}"
            text = f"How many {table.name} {whose} were {d.phrase} in {year}?"
            in_year = f"strftime('%Y', {t}.{d.name}) = '{year}'"
            query = f"select count(*) from {joined} where {p}.{c.name} = '{value}' and {in_year}"
            yield SqlQuestion("date", text, query)
    for n in parent.of("number") if label is not None else ():
        assert label is not None
        bound = draw.randint(n.low + (n.high - n.low) // 2, n.high)
        text = f"Give the {label.phrase} of all {table.name} whose {parent.one} has a {n.phrase} above {bound}."
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


CHECKED_ON = (5, 6)
"""Variants of a database that no task shows; a question is asked if its gold query gives rows on them too."""
_MOST_ROWS = 30
_YEARS = range(2019, 2024)
_DRAWS = 3
"""Questions of a form that names values or years."""

Split = Literal["train", "held_out"]
Form = tuple[str, tuple[str, str, str], str]
"""Sub-task, wordings (the last one is held out), gold query."""


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
        for subtask, wordings, query in _forms(name, draw):
            text = wordings[2] if split == "held_out" else draw.choice(wordings[:2])
            if _can_be_checked([one.execute(query).fetchall() for one in connections]):
                found.setdefault(text, SqlQuestion(subtask, text, query))
    return tuple(found.values())


def _can_be_checked(results: list[list[tuple[object, ...]]]) -> bool:
    """Whether a query gives a few rows on each database, and not the same on all."""
    is_fine = all(1 <= len(rows) <= _MOST_ROWS and (None,) not in rows for rows in results)
    return is_fine and any(rows != results[0] for rows in results[1:])


def _forms(name: str, draw: Random) -> Iterator[Form]:
    parents = {table.name: table for table in schema_of(name)}
    for table in schema_of(name):
        yield from _within_categories(table)
        yield from _years(table, draw)
        references = [(c, parents[c.values[0]]) for c in table.of("reference")]
        for reference, parent in references:
            yield from _shares(table, reference, parent, draw)
            yield from _sets(table, reference, parent, draw)
            yield from _means(table, reference, parent)
        for (left, one), (right, other) in pairwise(references):
            yield from _pairs(table, (left, one), (right, other))


def _within_categories(table: Table) -> Iterator[Form]:
    label, t, rows, row = table.label, table.name, table.name, table.one
    if label is None:
        return
    named = label.phrase
    for c in table.of("category"):
        for n in table.of("number"):
            wordings = (
                f"Give the {named} of all {rows} whose {n.phrase} is higher than the average "
                f"{n.phrase} of the {rows} with the same {c.phrase}.",
                f"Which {rows} are above the mean {n.phrase} of their own {c.phrase}? Give the {named}.",
                f"List, by {named}, every {row} that beats the average {n.phrase} within its "
                f"{c.phrase}.",
            )
            inner = f"select avg(b.{n.name}) from {t} b where b.{c.name} = a.{c.name}"
            yield "correlated", wordings, f"select {label.name} from {t} a where {n.name} > ({inner})"
            wordings = (
                f"For each {c.phrase}, give the highest {n.phrase} and the {named} of the "
                f"{rows} that have it, in the order {c.phrase}, {named}, {n.phrase}.",
                f"Give {c.phrase}, {named} and {n.phrase} of the {rows} with the highest "
                f"{n.phrase} of their {c.phrase}.",
                f"What are the {rows} that lead their {c.phrase} in {n.phrase}? Columns: {c.phrase}, "
                f"{named}, {n.phrase}.",
            )
            inner = f"select max(b.{n.name}) from {t} b where b.{c.name} = a.{c.name}"
            columns = f"{c.name}, {label.name}, {n.name}"
            yield "top_per_group", wordings, f"select {columns} from {t} a where {n.name} = ({inner})"
    for n in table.of("number"):
        wordings = (
            f"Give the {named} of the {rows} with the second highest {n.phrase}.",
            f"Which {rows} come second by {n.phrase}? Give the {named}.",
            f"Only one value of {n.phrase} is higher than theirs: give the {named} of these {rows}.",
        )
        below = f"select max({n.name}) from {t} where {n.name} < (select max({n.name}) from {t})"
        yield "second", wordings, f"select {label.name} from {t} where {n.name} = ({below})"


def _years(table: Table, draw: Random) -> Iterator[Form]:
    t, rows = table.name, table.name
    for d in table.of("date"):
        for early, late in draw.sample(list(combinations(_YEARS, 2)), _DRAWS):
            wordings = (
                f"How many more {rows} were {d.phrase} in {early} than in {late}? The number is negative if "
                "there were fewer.",
                f"Give the number of {rows} that were {d.phrase} in {early}, minus those of {late}.",
                f"By how much does the count of {rows} {d.phrase} in {early} exceed that of {late} (below zero "
                "if it does not)?",
            )
            counts = [f"sum(strftime('%Y', {d.name}) = '{year}')" for year in (early, late)]
            yield "difference", wordings, f"select {counts[0]} - {counts[1]} from {t}"
        wordings = (
            f"For each year, how many {rows} were {d.phrase}, and what is their share of all "
            f"{rows} in percent? Give year, number and percentage.",
            f"Give, for every year, the year, the number of {rows} that were {d.phrase} in it, and this "
            "number as a percentage of the total.",
            f"Break the {rows} down by the year in which they were {d.phrase}: year, count, percent of all.",
        )
        year = f"strftime('%Y', {d.name})"
        share = f"100.0 * count(*) / (select count(*) from {t})"
        yield "share", wordings, f"select {year}, count(*), {share} from {t} group by {year}"
        for n in table.of("number"):
            wordings = (
                f"In which years was the average {n.phrase} of the {rows} {d.phrase} in that year above "
                f"the average {n.phrase} of all {rows}?",
                f"Give the years whose {rows} ({d.phrase} in that year) have a mean {n.phrase} above the "
                "overall mean.",
                f"Which years beat the overall average {n.phrase}, counting the {rows} that were "
                f"{d.phrase} in each?",
            )
            having = f"having avg({n.name}) > (select avg({n.name}) from {t})"
            yield "having", wordings, f"select {year} from {t} group by {year} {having}"


def _shares(table: Table, reference: Column, parent: Table, draw: Random) -> Iterator[Form]:
    t, p, rows, owner, owners = table.name, parent.name, table.name, parent.one, parent.name
    joined = f"{t} join {p} on {t}.{reference.name} = {p}.id"
    for c in parent.of("category"):
        for value in draw.sample(c.values, min(_DRAWS, len(c.values))):
            wordings = (
                f"What percentage of the {rows} have a {owner} with the {c.phrase} {value}?",
                f"Give the share, in percent, of the {rows} whose {owner} has the {c.phrase} {value}.",
                f"Out of 100 {rows}, how many belong to a {owner} whose {c.phrase} is {value}? A decimal "
                "number.",
            )
            yield (
                "share",
                wordings,
                f"select 100.0 * sum({p}.{c.name} = '{value}') / count(*) from {joined}",
            )
        for n in table.of("number"):
            wordings = (
                f"Which {c.phrase} of {owners} has the highest total {n.phrase} of {rows}? Give the "
                f"{c.phrase} and the total.",
                f"Add up the {n.phrase} of the {rows} by the {c.phrase} of their {owner}: give the "
                f"{c.phrase} with the largest sum, and the sum.",
                f"Grouped by {owner} {c.phrase}, where is the sum of {n.phrase} over the {rows} "
                f"greatest? Columns: {c.phrase}, sum.",
            )
            total = (
                f"select {p}.{c.name} as k, sum({t}.{n.name}) as s from {joined} group by {p}.{c.name}"
            )
            highest = f"select max(s) from ({total})"
            yield "having", wordings, f"select k, s from ({total}) where s = ({highest})"


def _sets(table: Table, reference: Column, parent: Table, draw: Random) -> Iterator[Form]:
    t, p, label = table.name, parent.name, parent.label
    if label is None:
        return
    rows, owner, owners, named = table.name, parent.one, parent.name, label.phrase
    for d in table.of("date"):
        for first, other in draw.sample(list(permutations(_YEARS, 2)), _DRAWS):
            wordings = (
                f"Give the {named} of all {owners} with {rows} that were {d.phrase} in {first}, but "
                f"none in {other}.",
                f"Which {owners} have {rows} {d.phrase} in {first} and no {rows} {d.phrase} in "
                f"{other}? Give the {named}.",
                f"{owners.capitalize()} that appear among the {rows} {d.phrase} in {first} and are missing "
                f"from those of {other}: list the {named}.",
            )
            of = f"select {reference.name} from {t} where strftime('%Y', {d.name})"
            where = f"id in ({of} = '{first}') and id not in ({of} = '{other}')"
            yield "set", wordings, f"select {label.name} from {p} where {where}"
    for c in table.of("category"):
        for left, right in draw.sample(list(combinations(c.values, 2)), _DRAWS):
            wordings = (
                f"Give the {named} of all {owners} with {rows} of the {c.phrase} {left} and with "
                f"{rows} of the {c.phrase} {right}.",
                f"Which {owners} have both {left} and {right} among the {c.phrase} of their {rows}? "
                f"Give the {named}.",
                f"Name ({named}) every {owner} whose {rows} include a {c.phrase} of {left} as well "
                f"as one of {right}.",
            )
            of = f"select {reference.name} from {t} where {c.name}"
            where = f"id in ({of} = '{left}') and id in ({of} = '{right}')"
            yield "set", wordings, f"select {label.name} from {p} where {where}"


def _means(table: Table, reference: Column, parent: Table) -> Iterator[Form]:
    t, p, label = table.name, parent.name, parent.label
    if label is None:
        return
    rows, owner, owners, named = table.name, parent.one, parent.name, label.phrase
    joined = f"{t} join {p} on {t}.{reference.name} = {p}.id"
    for n in table.of("number"):
        wordings = (
            f"Give the {named} of all {owners} whose {rows} have, on average, a higher "
            f"{n.phrase} than all {rows} have.",
            f"Which {owners} have a mean {n.phrase} of their {rows} above the mean of all {rows}? "
            f"Give the {named}.",
            f"List the {named} of each {owner} that outdoes the overall average {n.phrase} with the "
            f"average of its own {rows}.",
        )
        having = f"having avg({t}.{n.name}) > (select avg({n.name}) from {t})"
        query = f"select {p}.{label.name} from {joined} group by {p}.id {having}"
        yield "having", wordings, query


def _pairs(table: Table, one: tuple[Column, Table], other: tuple[Column, Table]) -> Iterator[Form]:
    (left, first), (right, second) = one, other
    joined = (
        f"{table.name} join {first.name} on {table.name}.{left.name} = {first.name}.id "
        f"join {second.name} on {table.name}.{right.name} = {second.name}.id"
    )
    rows = table.name
    for a in first.of("category"):
        for b in second.of("category"):
            wordings = (
                f"How many {rows} are there for each pair of {first.one} {a.phrase} and {second.one} "
                f"{b.phrase} that has at least 5? Give both and the number.",
                f"Count the {rows} by the {a.phrase} of their {first.one} and the {b.phrase} of their "
                f"{second.one}; keep counts of 5 and more. Give {a.phrase}, {b.phrase}, count.",
                f"Which combinations of {first.one} {a.phrase} and {second.one} {b.phrase} occur in five or "
                f"more {rows}? Columns: {a.phrase}, {b.phrase}, how often.",
            )
            columns = f"{first.name}.{a.name}, {second.name}.{b.name}"
            query = f"select {columns}, count(*) from {joined} group by {columns} having count(*) >= 5"
            yield "pair", wordings, query
