"""Embeddings of episodes, and clusters among them: several clusters are several strategies.

An embedder maps texts to unit vectors. The usual one counts hashed words and pairs of words (feature hashing:
Weinberger et al., 2009) and needs no download; a sentence embedding model can stand in its place.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ludus.core.failures import ConfigError
from ludus.core.registry import load_reference
from ludus.synth.steps import EpisodeStep, call_text
from ludus.tools.library.retrieval import Embedder

Vectors = npt.NDArray[np.float32]
_WORD = re.compile(r"\w+")
_AT_ONCE = 1024


class TextEmbedder(Protocol):
    """Texts to vectors of length 1."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        """One row for each text."""


class HashedWords:
    """Words and pairs of neighbouring words, hashed to a fixed number of dimensions, by sign."""

    def __init__(self, dimensions: int = 256) -> None:
        self._dimensions = dimensions
        self._places: dict[str, tuple[int, float]] = {}

    def embed(self, texts: Sequence[str]) -> Vectors:
        found = np.zeros((len(texts), self._dimensions), dtype=np.float32)
        for row, text in zip(found, texts, strict=True):
            words = _WORD.findall(text.lower())
            for word in (*words, *(f"{a} {b}" for a, b in pairwise(words))):
                place, sign = self._place(word)
                row[place] += sign
        return unit(found)

    def _place(self, word: str) -> tuple[int, float]:
        if word not in self._places:
            digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=5).digest()
            number = int.from_bytes(digest[:4], "big")
            self._places[word] = number % self._dimensions, 1.0 if digest[4] & 1 else -1.0
        return self._places[word]


class SentenceModel:
    """A sentence embedding model, by its folder or its name on the hub."""

    def __init__(self, name: str) -> None:
        self._model = Embedder(name)

    def embed(self, texts: Sequence[str]) -> Vectors:
        return unit(self._model.encode(list(texts), "passage"))


def load_embedder(name: str) -> TextEmbedder:
    """hashed, sentence:MODEL (a folder or hub name), or 'module:object' of your own."""
    if name == "hashed":
        return HashedWords()
    if name.startswith("sentence:"):
        return SentenceModel(name.removeprefix("sentence:"))
    found = load_reference(name)
    made: TextEmbedder = found() if isinstance(found, type) else found
    if not callable(getattr(made, "embed", None)):
        raise ConfigError(f"the embedder {name!r} has no method embed(texts)")
    return made


def unit(vectors: Vectors) -> Vectors:
    """The same directions with length 1; a vector of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)


def strategy_text(steps: Sequence[EpisodeStep]) -> str:
    """What an episode did, without what it was asked and told: the same plan for another task looks alike."""
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
    centres = np.zeros((0, vectors.shape[1]), dtype=np.float32)
    labels: list[int] = []
    for start in range(0, len(vectors), _AT_ONCE):
        block = vectors[start : start + _AT_ONCE]
        known = block @ centres.T  # against the centres from before the block, all at once
        first = len(centres)
        for row, found in zip(block, known, strict=True):
            own = np.concatenate([found, centres[first:] @ row])
            nearest = int(own.argmax()) if len(own) else -1
            if nearest < 0 or own[nearest] < similarity:
                nearest, centres = len(centres), np.vstack([centres, row[None]])
            labels.append(nearest)
    return Clusters(labels)
