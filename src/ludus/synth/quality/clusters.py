"""Clusters among the embeddings of episodes: several clusters are several strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ludus.llm.embeddings import Vectors
from ludus.synth.steps import EpisodeStep, call_text

_AT_ONCE = 1024


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
