"""Decontamination: examples of tasks that are held out, or of their near copies, are left out.

A task is what it asks, with what its environments are given. Two tasks are the same when the arguments of their
environments are, and either

- their words overlap (Jaccard of runs of three words above a threshold) and their numbers are the same:
  templates differ by a number, and a game's tasks by its arguments alone; or,
- with an embedder, their sense does (cosine of their embeddings), and every name and number of the held-out one
  occurs in the other: a rewording keeps those, and siblings from one template differ in them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ludus.core.messages import Message
from ludus.core.task import Task
from ludus.llm.embeddings import TextEmbedder, Vectors
from ludus.observe import dump_value
from ludus.synth.quality.similarity import DuplicateIndex, cluster, shingles, sketch

REWORDED_SIMILARITY = 0.7
"""Where MiniLM tells rewordings from other tasks: `benchmarks/data_quality.py --embedder` measures it."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_WORD = re.compile(r"\w+(?:[-.:]\w+)*")
_NAME = re.compile(r"(?<=[\w,;:(\"'] )(?:[A-Z]\w*|\w*(?:\w_\w|[a-z][A-Z])\w*)")
"""A capital inside a sentence, or an identifier."""
_SPELLED = dict(
    zip(
        ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
        range(2, 11),
        strict=True,
    )
)
"""Without "one", which is mostly a pronoun."""


class Senses:
    """The embeddings of texts, each embedded once and many in one call."""

    def __init__(self, embedder: TextEmbedder, threshold: float = REWORDED_SIMILARITY) -> None:
        self.threshold = threshold
        self._embedder = embedder
        self._known: dict[str, Vectors] = {}

    def of(self, texts: Sequence[str]) -> Vectors:
        """One row for each text."""
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        if new:
            self._known |= dict(zip(new, self._embedder.embed(new), strict=True))
        return np.stack([self._known[text] for text in texts])


@dataclass(slots=True)
class _Place:
    """The held-out tasks with the same arguments of environments."""

    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    by_numbers: dict[tuple[str, ...], tuple[DuplicateIndex, list[int]]] = field(default_factory=dict)


class HeldOut:
    """The tasks that nothing may be learned from."""

    def __init__(
        self, tasks: Sequence[Task], threshold: float = 0.8, senses: Senses | None = None
    ) -> None:
        self._senses = senses
        self._places: defaultdict[str, _Place] = defaultdict(_Place)
        for task in tasks:
            text = asked(task.messages)
            place = self._places[given(task)]
            index, numbers = place.by_numbers.setdefault(_numbers(text), (DuplicateIndex(threshold), []))
            index.add(sketch(shingles(_plain(text))))
            numbers.append(len(place.ids))
            place.ids.append(task.id)
            place.texts.append(text)
        if senses is not None:  # all in one call
            senses.of([text for place in self._places.values() for text in place.texts] or [""])

    def find(self, task: Task, messages: Sequence[Message]) -> tuple[str, float] | None:
        """The held-out task that an example is of, and how alike their texts are."""
        place = self._places.get(given(task))
        if place is None:
            return None
        texts = sorted({asked(task.messages), asked(messages)} - {""})
        for text in texts:
            index, numbers = place.by_numbers.get(_numbers(text), (None, []))
            found = None if index is None else index.find(sketch(shingles(_plain(text))))
            if found is not None:
                return place.ids[numbers[found[0]]], found[1]
        for text in texts:
            found = self._reworded(place, text)
            if found is not None:
                return place.ids[found[0]], found[1]
        return None

    def _reworded(self, place: _Place, text: str) -> tuple[int, float] | None:
        """The nearest in sense whose names and numbers all occur in this text."""
        if self._senses is None:
            return None
        near = self._senses.of(place.texts) @ self._senses.of([text])[0]
        words = _words(text)
        for number in np.argsort(-near, kind="stable"):
            if near[number] < self._senses.threshold:
                break
            if specifics(place.texts[number]) <= words:
                return int(number), float(near[number])
        return None


def first_wordings(
    asked_of: Iterable[tuple[Task, str]], senses: Senses
) -> Mapping[tuple[str, str], str]:
    """For each (arguments of environments, text), the first text of the same sense, names and numbers."""
    together: defaultdict[tuple[str, frozenset[str]], dict[str, None]] = defaultdict(dict)
    for task, text in asked_of:
        together[given(task), specifics(text)][text] = None
    senses.of([text for texts in together.values() for text in texts] or [""])
    first: dict[tuple[str, str], str] = {}
    for (place, _), texts in together.items():
        listed = list(texts)
        labels = cluster(senses.of(listed), senses.threshold).labels
        leaders: dict[int, str] = {}  # the first text of a cluster is its centre
        for text, label in zip(listed, labels, strict=True):
            first[place, text] = leaders.setdefault(label, text)
    return first


def asked(messages: Sequence[Message]) -> str:
    """The user's text before the assistant's first message."""
    texts: list[str] = []
    for message in messages:
        if message.role == "assistant":
            break
        if message.role == "user":
            texts.append(message.content)
    return "\n".join(texts)


def given(task: Task) -> str:
    """The arguments of a task's environments, as text in which equal ones are equal."""
    return dump_value(dict(task.envs))[0]


def specifics(text: str) -> frozenset[str]:
    """Numbers and names of a text: what a rewording keeps. A name is a capital inside a sentence."""
    names = {name.lower() for name in _NAME.findall(text)} - {"i"}
    return frozenset(
        names | {_digits(word) for word in _WORD.findall(text) if _digits(word)[:1].isdigit()}
    )


def _words(text: str) -> set[str]:
    found = [word.lower() for word in _WORD.findall(text)]
    return {part for word in found for part in (_digits(word), *re.findall(r"\w+", word))}


def _digits(word: str) -> str:
    word = word.lower()
    return str(_SPELLED.get(word, word))


def _numbers(text: str) -> tuple[str, ...]:
    return tuple(sorted(_NUMBER.findall(text)))


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
