"""Packing: which rows are computed together, in micro-batches of at most a budget of tokens.

For one rank the packing is best-fit decreasing: rows (or bundles of rows that share a prefix) are placed
longest first, each into the fullest micro-batch that still has room. For several ranks, which wait for each
other in every round, all micro-batches are made about equally large instead, and their number is a multiple of
the number of ranks. Both are deterministic: every rank finds the same packing by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from ludus.training.data.prefixes import Bundle, Ints, bundles_of, computed_tokens


def micro_batches_of(lengths: Sequence[int], budget: int, ranks: int = 1) -> list[list[int]]:
    """Row numbers in micro-batches of at most `budget` tokens; a longer row travels alone.

    Longest first, each into the fullest micro-batch that still takes it: few of them, evenly filled, and
    rows of like length together, which is what attention over packed rows likes best. For several `ranks` they
    are as even as can be instead, and as many as there are ranks or a multiple of that.
    """
    return _even_batches(lengths, budget, ranks) if ranks > 1 else _full_batches(lengths, budget)


_PARTS = (0.5, 1, 1.25, 1.5)
"""Largest sizes of bundles that are tried, as shares of a rank's part of all tokens."""


def shared_micro_batches_of(keys: Sequence[Ints], budget: int, ranks: int = 1) -> list[list[int]]:
    """Row numbers in micro-batches, where rows that begin alike go together and count shared tokens once.

    For several ranks there is a trade-off: rows of one prefix compute the fewest tokens on one rank, and are
    finished sooner when they are divided over the ranks. Several largest sizes of bundles are tried, down to
    single rows, and the plan with the shortest duration is taken.
    """
    if ranks == 1:
        return _bundled(bundles_of(keys, budget), budget, ranks)
    part = sum(bundle.size for bundle in bundles_of(keys, budget)) / ranks
    limits = [budget, *(min(budget, int(part * some) + 1) for some in _PARTS), 1]
    plans = [_bundled(bundles_of(keys, limit), budget, ranks) for limit in limits]
    return min(plans, key=lambda plan: _duration(plan, keys, ranks))


def _bundled(bundles: Sequence[Bundle], budget: int, ranks: int) -> list[list[int]]:
    batches = micro_batches_of([bundle.size for bundle in bundles], budget, ranks)
    return [[row for i in batch for row in bundles[i].rows] for batch in batches]


def _duration(batches: Sequence[Sequence[int]], keys: Sequence[Ints], ranks: int) -> int:
    """Tokens that are computed one after the other: in each round, those of the largest micro-batch."""
    sizes = [computed_tokens([keys[i] for i in batch]) for batch in batches]
    return sum(max(sizes[first : first + ranks]) for first in range(0, len(sizes), ranks))


def _full_batches(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Longest first, each into the fullest batch that still takes it."""
    batches: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        fits = [b for b, left in enumerate(room) if left >= size]
        if fits:
            best = min(fits, key=lambda b: room[b])
            batches[best].append(index)
            room[best] -= size
        else:
            batches.append([index])
            room.append(budget - size)
    return batches


def _even_batches(sizes: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """Longest first, each into the batch with the fewest tokens; the largest batches come first.

    Ranks that compute at the same time then have about as much to do.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    count = ranks * max(1, -(-sum(sizes) // (budget * ranks)))
    while True:
        batches: list[list[int]] = [[] for _ in range(count)]
        loads = [(0, place) for place in range(count)]
        for index in order:
            load, place = heapq.heappop(loads)
            batches[place].append(index)
            heapq.heappush(loads, (load + sizes[index], place))
        if all(load <= budget or len(batches[place]) < 2 for load, place in loads):
            return [
                batches[place]
                for load, place in sorted(loads, key=lambda one: (-one[0], one[1]))
                if load
            ]
        count += ranks


def split_point(lengths: Sequence[int], own: Sequence[int] | None = None) -> tuple[int, int]:
    """(rows, tokens) of the first half: at least a row each, and as even as whole rows allow.

    Where rows share prefixes, `own` has what each adds to those before it. The second half computes anew what
    its first row shared with the first half, so that it is best cut where little is shared.
    """
    if len(lengths) < 2:
        raise ValueError("a single row cannot be halved")
    ends = list(accumulate(lengths))
    added = list(accumulate(lengths if own is None else own))

    def larger(row: int) -> int:
        again = 0 if own is None else lengths[row] - own[row]
        return max(added[row - 1], added[-1] - added[row - 1] + again)

    row = min(range(1, len(lengths)), key=larger)
    return row, ends[row - 1]
