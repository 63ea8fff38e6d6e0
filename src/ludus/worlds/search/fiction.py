"""A small invented encyclopedia: people, towns, countries, rivers, companies, books and schools.

Everything is generated from a fixed key and the words in `fiction.toml`: no text is copied from elsewhere, and
no language model can know the answers before it has searched. Each entity has one article. An article states
the entity's facts, one sentence each, and never those of the entities that it mentions, so a question over two
relations needs two searches. Names share their parts, so every title has close neighbours.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ludus.core.random import key, shuffled, uniform

_SEED = 20261116
Facts = dict[str, str]
"""Facts of one entity, by relation."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact that an article states, and how one asks for it."""

    name: str
    sentences: tuple[str, ...]
    """Ways to state it: {s} is the entity, {o} the value."""
    question: str
    """{x} is what is asked about."""
    phrase: str = ""
    """The value as part of a longer question, where it is an entity itself: {s} is what it belongs to."""
    kind: str = ""
    """The kind of that entity."""

    def read(self, article: str, subject: str) -> str | None:
        """The value that an article states, or None."""
        for sentence in self.sentences:
            pattern = re.escape(sentence).replace(r"\{s\}", re.escape(subject))
            found = re.search(pattern.replace(r"\{o\}", r"([^.]+?)"), article)
            if found:
                return found[1]
        return None


_WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RELATIONS: dict[str, tuple[Relation, ...]] = {
    kind: tuple(Relation(**{**row, "sentences": tuple(row["sentences"])}) for row in rows)
    for kind, rows in _WORDS["relations"].items()
}
BY_NAME = {relation.name: relation for relations in RELATIONS.values() for relation in relations}


class _Draw:
    """Choices that a name alone decides."""

    def __init__(self, *name: str) -> None:
        self._key, self._count = key(_SEED, *name), 0

    def number(self, below: int) -> int:
        self._count += 1
        return int(uniform(self._key, self._count) * below)

    def of(self, values: Sequence[str]) -> str:
        return values[self.number(len(values))]


@cache
def entities() -> dict[str, list[str]]:
    """The names of all entities, by kind."""
    chosen = {}
    for kind, (first, second) in _WORDS["names"].items():
        names = [f"{a}{b}" for a in first for b in second]
        count = _WORDS["counts"][kind]
        chosen[kind] = [names[i] for i in shuffled(len(names), key(_SEED, kind))[:count]]
    return chosen


@cache
def facts() -> dict[str, Facts]:
    """All facts, by entity."""
    names = entities()
    known: dict[str, Facts] = {}
    for kind, relations in RELATIONS.items():
        for name in names[kind]:
            draw = _Draw(kind, name)
            own = known[name] = {}
            for relation in relations:
                others = [one for one in names.get(relation.kind, ()) if one != name]
                if relation.kind:
                    own[relation.name] = draw.of(others)
                elif relation.name == "length":
                    own[relation.name] = str(40 + draw.number(900))
                elif relation.name.endswith("year"):
                    own[relation.name] = str(_WORDS["first_year"][kind] + draw.number(90))
                else:
                    own[relation.name] = draw.of(_WORDS["values"][relation.name])
    people = names["person"]
    for one, other in zip(people[::2], people[1::2], strict=True):
        known[one]["spouse"], known[other]["spouse"] = other, one
    for country in names["country"]:
        at_home = [town for town in names["town"] if known[town]["country"] == country]
        known[country]["capital"] = _Draw("capital", country).of(at_home or names["town"])
    return known


@cache
def articles() -> tuple[tuple[str, str], ...]:
    """The encyclopedia: a title and a text for each entity."""
    return tuple((name, _article(kind, name)) for kind, names in entities().items() for name in names)


def _article(kind: str, name: str) -> str:
    draw = _Draw("article", name)
    stated = facts()[name]
    sentences = [
        draw.of(relation.sentences).format(s=name, o=stated[relation.name])
        for relation in RELATIONS[kind]
    ]
    order = shuffled(len(sentences), key(_SEED, "order", name))
    return " ".join(sentences[i] for i in order)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer, and the way to it."""

    text: str
    answer: str
    subtask: str
    subjects: tuple[str, ...]
    """The entities that it names."""
    relations: tuple[str, ...]
    """The relations to follow from each of them; of two subjects, the earlier year is meant."""


def questions(chosen: frozenset[str]) -> Iterator[Question]:
    """Questions that name only these entities: single facts, chains of two, comparisons of two years."""
    known = facts()
    for kind, names in entities().items():
        mine = [name for name in names if name in chosen]
        for position, name in enumerate(mine):
            draw = _Draw("question", name)
            for relation in _some(RELATIONS[kind], 2, draw):
                answer = known[name][relation.name]
                yield Question(
                    relation.question.format(x=_called(kind, name)),
                    answer,
                    "1-hop",
                    (name,),
                    (relation.name,),
                )
            for relation in _some([one for one in RELATIONS[kind] if one.kind], 2, draw):
                middle = known[name][relation.name]
                asked = [
                    one
                    for one in RELATIONS[relation.kind]
                    if known[middle][one.name] != name and one.name != relation.name
                ]
                last = asked[draw.number(len(asked))]
                text = last.question.format(x=relation.phrase.format(s=_called(kind, name)))
                steps = (relation.name, last.name)
                yield Question(text, known[middle][last.name], "bridge", (name,), steps)
            year = next((one.name for one in RELATIONS[kind] if one.name in _WORDS["compared"]), None)
            if year and position % 2:
                pair = (mine[position - 1], name)
                first, second = (int(known[one][year]) for one in pair)
                if first != second:
                    text = _WORDS["compared"][year].format(a=pair[0], b=pair[1])
                    yield Question(text, pair[second < first], "comparison", pair, (year,))


def _some(relations: Sequence[Relation], count: int, draw: _Draw) -> list[Relation]:
    left = list(relations)
    return [left.pop(draw.number(len(left))) for _ in range(min(count, len(left)))]


def _called(kind: str, name: str) -> str:
    return f"the river {name}" if kind == "river" else name
