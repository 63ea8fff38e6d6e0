"""Sharing out a number of things by weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def allocate(count: int, weights: Mapping[K, float]) -> dict[K, int]:
    """`count` in proportion to the weights, by largest remainder; equal shares where all weights are 0.

    The shares add up to `count`, and each is within 1 of its exact part.
    """
    if not weights:
        return {}
    if any(not weight >= 0 for weight in weights.values()):
        raise ValueError(f"weights are numbers of at least 0, not {dict(weights)!r:.200}")
    total = sum(weights.values())
    exact = {
        name: count * (weight / total if total else 1 / len(weights)) for name, weight in weights.items()
    }
    shares = {name: int(part) for name, part in exact.items()}
    left = count - sum(shares.values())
    by_rest = sorted(exact, key=lambda name: (shares[name] - exact[name], list(exact).index(name)))
    for name in by_rest[:left]:
        shares[name] += 1
    return shares
