"""Eleven small databases, made on the spot: the same on every machine.

Each has two or three tables with keys into each other, names, categories, numbers and dates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from random import Random
from typing import Literal, cast

from ludus.core.random import key

_FIRST = [
    "Ada", "Bela", "Chen", "Dora", "Emil", "Femi", "Gita", "Hugo", "Ines", "Jomo", "Kim", "Lena", "Milo",
    "Nora", "Omar", "Pia",
]  # fmt: skip
_LAST = [
    "Abel", "Brook", "Cruz", "Diaz", "Ezra", "Frost", "Gray", "Holm", "Ito", "Jung", "Klein", "Lund",
    "Mora", "Nash", "Okoro", "Petri",
]  # fmt: skip
_WHICH = [
    "Amber", "Blue", "Copper", "Dark", "Early", "Far", "Golden", "Hidden", "Iron", "Last", "Little",
    "Long", "Old", "Quiet", "Red", "Silver",
]  # fmt: skip
_WHAT = [
    "Arrow", "Bridge", "Cloud", "Door", "Ember", "Field", "Garden", "Harbour", "Island", "Journey", "Key",
    "Lantern", "Moon", "River", "Stone", "Tower",
]  # fmt: skip
Kind = Literal["person", "title", "category", "number", "date", "reference"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column by what it holds. `phrase` is what questions call it."""

    name: str
    kind: Kind
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


_COUNTRIES = "Brazil Chile France Ghana India Japan Kenya Norway Peru Spain"
_CITIES = "Accra Bergen Cusco Delhi Lyon Osaka Porto Quito"
_SCHEMAS = f"""
library
  authors, author, 14: name person; country category {_COUNTRIES}; birth_year number 1900 1990
  books, book, 40: title title; author_id reference authors; genre category novel poetry history science;
    pages number 80 900 (number of pages)
  loans, loan, 90: book_id reference books; days number 1 60 (number of days); lent_on date (made)
shop
  customers, customer, 18: name person; city category {_CITIES}; joined_on date (registered)
  products, product, 24: name title; department category garden kitchen office sport toys; price number 2 400
  orders, order, 110: customer_id reference customers; product_id reference products; quantity number 1 12;
    ordered_on date (placed)
school
  teachers, teacher, 12: name person; subject category art biology chemistry maths music;
    salary number 2100 5900
  courses, course, 22: title title; teacher_id reference teachers; seats number 8 60 (number of seats)
  enrolments, enrolment, 100: course_id reference courses; student person; grade number 1 100;
    signed_on date (made)
clinic
  doctors, doctor, 12: name person; field category heart skin eyes children surgery;
    years number 1 38 (number of years of work)
  patients, patient, 30: name person; city category {_CITIES}; age number 1 95
  visits, visit, 95: doctor_id reference doctors; patient_id reference patients; fee number 20 480;
    visited_on date (made)
airline
  airports, airport, 12: name title; country category {_COUNTRIES}; altitude number 2 3200
  planes, plane, 14: name title; maker category Aero Borea Condor Delfin;
    seats number 20 400 (number of seats)
  flights, flight, 105: airport_id reference airports; plane_id reference planes; distance number 150 9800;
    departed_on date (flown)
farm
  fields, field, 14: name title; soil category clay loam peat sand; area number 2 90
  harvests, harvest, 85: field_id reference fields; crop category barley beans maize rye wheat;
    weight number 120 8900; harvested_on date (brought in)
museum
  artists, artist, 15: name person; country category {_COUNTRIES}; birth_year number 1600 1970
  works, work, 45: title title; artist_id reference artists; material category bronze marble oil paper wood;
    height number 10 400; bought_on date (bought)
hotel
  rooms, room, 20: name title; class category single double suite; rate number 45 390; floor number 1 9
  guests, guest, 26: name person; country category {_COUNTRIES}
  stays, stay, 90: room_id reference rooms; guest_id reference guests;
    nights number 1 14 (number of nights); arrived_on date (begun)
cinema
  directors, director, 13: name person; country category {_COUNTRIES}; birth_year number 1920 1992
  films, film, 36: title title; director_id reference directors; genre category comedy crime drama western;
    minutes number 70 210 (length in minutes)
  screenings, screening, 95: film_id reference films; tickets number 3 260 (number of tickets);
    shown_on date (held)
league
  teams, team, 12: name title; city category {_CITIES}; founded number 1890 2005 (year of foundation)
  players, player, 48: name person; team_id reference teams;
    position category goalkeeper defender midfielder striker; goals number 0 60 (number of goals);
    signed_on date (signed)
observatory
  telescopes, telescope, 10: name title; country category {_COUNTRIES};
    mirror number 40 980 (size of the mirror)
  stars, star, 30: name title; colour category blue red white yellow; distance number 4 2900
  recordings, recording, 100: telescope_id reference telescopes; star_id reference stars;
    minutes number 5 240 (length in minutes); recorded_on date (made)
"""
NAMES = tuple(re.findall(r"^(\w+)$", _SCHEMAS, re.MULTILINE))
HELD_OUT = ("cinema", "league", "observatory")
"""No training question is about one of these."""
VARIANTS = 4
"""How often a schema is filled with other data, for training: `library-1` to `library-4`."""


@cache
def schema_of(name: str) -> tuple[Table, ...]:
    """The tables of a database, such as `library-2`."""
    blocks = re.split(r"^(?=\w)", _SCHEMAS.strip(), flags=re.MULTILINE)
    bodies = {head: body for head, _, body in (block.partition("\n") for block in blocks if block)}
    tables = re.findall(
        r"^  (\w+), (\w+), (\d+): ((?:.|\n    )*)", bodies[name.partition("-")[0]], re.MULTILINE
    )
    return tuple(
        Table(many, one, int(size), tuple(_column(text) for text in columns.split(";")))
        for many, one, size, columns in tables
    )


def _column(text: str) -> Column:
    """A column as the list above writes it: name, kind, what it holds, and in brackets what it is called."""
    body, _, phrase = text.strip().rstrip(")").partition(" (")
    name, kind, *rest = body.split()
    low, high = map(int, rest) if kind == "number" else (0, 0)
    called = phrase or name.removesuffix("_id").replace("_", " ")
    return Column(name, cast("Kind", kind), called, tuple(rest), low, high)


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
    one, other = (_FIRST, _LAST) if label is not None and label.kind == "person" else (_WHICH, _WHAT)
    names = [f"{a} {b}" for a in one for b in other]
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
