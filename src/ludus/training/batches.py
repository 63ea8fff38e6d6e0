"""Which tasks a step gets: every task once an epoch, in an order that the seed and the epoch decide.

A pure function of the step, so that a resumed run sees exactly the tasks it would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ludus.core.random import key, shuffled

T = TypeVar("T")


def items_of_step(items: Sequence[T], step: int, size: int, seed: int) -> list[T]:
    """The `size` items of step number `step`; a batch that crosses an epoch's end goes on in the next."""
    chosen: list[T] = []
    place = step * size
    while len(chosen) < size:
        epoch, offset = divmod(place, len(items))
        order = shuffled(len(items), key(seed, "epoch", epoch))
        take = order[offset : offset + size - len(chosen)]
        chosen.extend(items[i] for i in take)
        place += len(take)
    return chosen
