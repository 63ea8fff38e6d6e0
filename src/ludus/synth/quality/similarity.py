"""Near-duplicates among many sets, decontamination, and clusters of embeddings: clusters are strategies.

Near-duplicates are sets with J(a, b) = |a ∩ b| / |a ∪ b| above a threshold t. Two sets of sizes x and y can
only be so alike when they share an element among the first x − ⌈t · x⌉ + 1 of the one and the first y − ⌈t · y⌉
+ 1 of the other, in any order that is the same for both (prefix filtering: Chaudhuri et al., 2006). So a set is
indexed by those few elements, rare ones first, and nothing is missed. Sets of more than `SKETCH` elements are
replaced by their smallest hashes (bottom-k MinHash: Broder, 1997), and their similarity is estimated.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ludus.core.messages import Message
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.llm.embeddings import TextEmbedder, Vectors
from ludus.observe import dump_value
from ludus.synth.episodes import EpisodeStep, call_text

SKETCH = 512
_AT_ONCE = 1024


def sketch(elements: Iterable[str]) -> frozenset[int]:
    """The hashes of a set's elements; of a large one, the smallest."""
    hashes = {
        int.from_bytes(
            hashlib.blake2b(one.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
        )
        for one in elements
    }
    return frozenset(hashes if len(hashes) <= SKETCH else sorted(hashes)[:SKETCH])


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """The similarity of two sketches: exact where both are whole sets."""
    if not a and not b:
        return 1.0
    if max(len(a), len(b)) < SKETCH:
        return len(a & b) / len(a | b)
    union = sorted(a | b)[:SKETCH]  # an estimate from the smallest hashes of the union
    return sum(one in a and one in b for one in union) / len(union)


def shingles(text: str) -> set[str]:
    """The runs of three words of a text; the words themselves where there are fewer."""
    words = text.lower().split()
    if len(words) < 3:
        return set(words)
    return {" ".join(words[i : i + 3]) for i in range(len(words) - 2)}


class DuplicateIndex:
    """Sets that were kept; finds one of them that a new one is too much like."""

    def __init__(self, threshold: float, all_sets: Sequence[frozenset[int]] = ()) -> None:
        """Above `threshold` two sets are alike. `all_sets` are those to come: their rare elements are looked at
        first, which is faster, and changes nothing else."""
        self._threshold = threshold
        self._counts = Counter(element for one in all_sets for element in one)
        self._kept: list[frozenset[int]] = []
        self._holding: defaultdict[int, list[int]] = defaultdict(list)
        self._empty: int | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, one: frozenset[int]) -> tuple[int, float] | None:
        """The kept set that is most like this one, above the threshold, as (its number, similarity)."""
        if not one:
            return None if self._empty is None else (self._empty, 1.0)
        best: tuple[int, float] | None = None
        seen: set[int] = set()
        for element in self._prefix(one):
            for number in self._holding.get(element, ()):
                if number in seen:
                    continue
                seen.add(number)
                other = self._kept[number]
                if min(len(one), len(other)) < self._threshold * max(len(one), len(other)):
                    continue
                found = jaccard(one, other)
                if found > self._threshold and (best is None or found > best[1]):
                    best = number, found
        return best

    def add(self, one: frozenset[int]) -> int:
        """Keep a set; its number."""
        number = len(self._kept)
        self._kept.append(one)
        if not one and self._empty is None:
            self._empty = number
        for element in self._prefix(one):
            self._holding[element].append(number)
        return number

    def _prefix(self, one: frozenset[int]) -> list[int]:
        ordered = sorted(one, key=lambda element: (self._counts[element], element))
        if len(one) >= SKETCH:
            return ordered  # a sketch's similarity is an estimate, to which the bound does not apply
        return ordered[: len(one) - math.ceil(self._threshold * len(one)) + 1]


class KeptExamples:
    """The examples that were kept, from which a new one must differ."""

    def __init__(self, max_similarity: float, all_sets: Sequence[frozenset[int]] = ()) -> None:
        self._index = DuplicateIndex(max_similarity, all_sets)
        self._kept: list[Trajectory] = []

    def alike(self, elements: frozenset[int]) -> tuple[Trajectory, str] | None:
        """The kept example that is most like this one, if it is too much so, and that in words."""
        found = self._index.find(elements)
        if found is None:
            return None
        other = self._kept[found[0]]
        return other, f"{found[1]:.2f} like attempt {other.attempt} at task {other.task.id}"

    def add(self, trajectory: Trajectory, elements: frozenset[int]) -> None:
        self._index.add(elements)
        self._kept.append(trajectory)


def strategy_text(steps: Sequence[EpisodeStep]) -> str:
    """The actions of an episode, without prompt and results: one plan for two tasks looks alike."""
    return "\n".join(
        " ".join([step.said[:500], *(call_text(call)[:500] for call in step.calls)]) for step in steps
    )


@dataclass(frozen=True, slots=True)
class Clusters:
    """Which cluster each vector is in; the first one of a cluster is its centre."""

    labels: list[int]

    @property
    def sizes(self) -> list[int]:
        return np.bincount(self.labels).tolist() if self.labels else []

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def largest_share(self) -> float:
        return max(self.sizes, default=0) / max(1, len(self.labels))

    @property
    def effective(self) -> float:
        """exp of the entropy over clusters: how many equally large ones would be as varied."""
        shares = [size / len(self.labels) for size in self.sizes]
        return math.exp(-sum(share * math.log(share) for share in shares)) if shares else 0.0


def cluster(vectors: Vectors, similarity: float = 0.8) -> Clusters:
    """Leader clustering: a vector joins the nearest centre of at least this cosine, or becomes one itself.

    The order decides, so the same examples in the same order have the same clusters.
    """
    centres, count = np.empty_like(vectors), 0
    labels: list[int] = []
    for start in range(0, len(vectors), _AT_ONCE):
        block = vectors[start : start + _AT_ONCE]
        first = count
        known = block @ centres[:first].T  # against the centres from before the block, all at once
        for row, found in zip(block, known, strict=True):
            own = np.concatenate([found, centres[first:count] @ row])
            nearest = int(own.argmax()) if len(own) else -1
            if nearest < 0 or own[nearest] < similarity:
                nearest, count = count, count + 1
                centres[nearest] = row
            labels.append(nearest)
    return Clusters(labels)


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


# Decontamination: examples of tasks that are held out, or of their near copies, are left out. A task is what it
# asks, with what its environments are given. Two tasks are the same when the arguments of their environments
# are, and either
#
# - their words overlap (Jaccard of runs of three words above a threshold) and their numbers are the same:
#   templates differ by a number, and a game's tasks by its arguments alone; or,
# - with an embedder, their sense does (cosine of their embeddings), and every name and number of the held-out
#   one occurs in the other: a rewording keeps those, and siblings from one template differ in them.


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
