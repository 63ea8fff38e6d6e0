"""Which tasks a step gets: every task once an epoch, in an order that the seed and the epoch decide.

All of it is pure, a function of seed, position and weights, so that a resumed run sees exactly the tasks it
would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from typing import TypeVar

from ludus.core.random import key, shuffled

T = TypeVar("T")


def items_of_step(items: Sequence[T], step: int, size: int, seed: int) -> list[T]:
    """The `size` items of step number `step`; a batch that crosses an epoch's end goes on in the next."""
    return [items[i] for i in islice(walk(len(items), step * size, seed), size)]


def walk(count: int, place: int, seed: int) -> Iterator[int]:
    """The numbers below `count` from a place on, epoch by epoch, for ever: each of them once an epoch."""
    while True:
        epoch, offset = divmod(place, count)
        order = shuffled(count, key(seed, "epoch", epoch))[offset:]
        yield from order
        place += len(order)


def next_sets(weights: Sequence[float], drawn: Sequence[int], size: int) -> list[int]:
    """From which sets the next `size` items come, when `drawn` have come from each of them so far.

    Every prefix follows the weights as closely as any sequence can: after n items, a set with share w has
    had w * n of them, give or take 1 - 1 / (2 * sets - 2). Of the sets that are at all due, the one goes
    first whose deadline for staying within that bound comes first. Tijdeman, "The chairman assignment
    problem", Discrete Mathematics 32, 1980.
    """
    if len(weights) == 1:
        return [0] * size
    total = sum(map(Fraction, weights))  # exact, because a rounded tie could leave nobody due
    shares = [Fraction(weight) / total for weight in weights]
    slack = Fraction(1, 2 * len(weights) - 2)
    had, place = list(drawn), sum(drawn)
    chosen: list[int] = []
    for n in range(place + 1, place + size + 1):
        due = [i for i, share in enumerate(shares) if share * n - had[i] >= slack]
        first = min(due, key=lambda i: (had[i] + 1 - slack) / shares[i])
        had[first] += 1
        chosen.append(first)
    return chosen
