"""Micro-batches: which rows travel together, on which rank, and in how many pieces where memory is short."""

from __future__ import annotations

import gc
import heapq
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Generic, Protocol, Self, TypeVar

import torch

from ludus.core.failures import LudusError
from ludus.training.data.prefixes import Bundle, Ints, bundles_of, computed_tokens

log = logging.getLogger(__name__)


def micro_batches_of(lengths: Sequence[int], budget: int, ranks: int = 1) -> list[list[int]]:
    """Row numbers in micro-batches of at most `budget` tokens; a longer row travels alone.

    Longest first, each into the fullest micro-batch that still takes it: few of them, evenly filled, and
    rows of like length together, which is what attention over packed rows likes best. For several `ranks` they
    are as even as can be instead, and as many as there are ranks or a multiple of that.
    """
    return _even_batches(lengths, budget, ranks) if ranks > 1 else _full_batches(lengths, budget)


_PARTS = (0.5, 1, 1.25, 1.5)
"""Of a rank's part of all tokens: what rows that share a prefix may take before they are dealt out."""


def shared_micro_batches_of(keys: Sequence[Ints], budget: int, ranks: int = 1) -> list[list[int]]:
    """The same for rows that may begin alike: these travel together, and what they share counts once.

    Ranks that compute at the same time need about as much to do, so for several of them rows that share a
    prefix are kept together or dealt out, whichever has all ranks done first.
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


class MicroBatch(Protocol):
    """A micro-batch of whole rows."""

    @property
    def lengths(self) -> Sequence[int]:
        """The tokens of each row."""

    @property
    def computed(self) -> int:
        """The tokens that a pass computes: all of them, less those of shared prefixes."""

    def split(self) -> tuple[Self, Self]: ...


B = TypeVar("B", bound=MicroBatch)


@dataclass(frozen=True, slots=True)
class Round(Generic[B]):
    """What all ranks compute at the same time: a micro-batch each, or None for one that has nothing left.

    Every rank knows the whole round, so that all of them split it alike.
    """

    batches: tuple[B | None, ...]

    @property
    def lengths(self) -> Sequence[int]:
        """Of the largest micro-batch: it decides whether a round can be split."""
        return self._largest.lengths

    @property
    def computed(self) -> int:
        return self._largest.computed

    @property
    def _largest(self) -> B:
        return max((one for one in self.batches if one is not None), key=lambda one: one.computed)

    def split(self) -> tuple[Round[B], Round[B]]:
        """Two rounds with a half of each micro-batch; one of a single row stays whole."""
        halves = [
            one.split() if one is not None and len(one.lengths) > 1 else (one, None)
            for one in self.batches
        ]
        return Round(tuple(first for first, _ in halves)), Round(tuple(second for _, second in halves))

    def of_rank(self, rank: int) -> tuple[B, bool]:
        """A rank's micro-batch, and whether it counts. A rank without one computes a short row for nothing:

        all ranks must make the same passes, because each of them gathers parameters from all.
        """
        own = self.batches[rank]
        if own is not None:
            return own, True
        filler = next(one for one in self.batches if one is not None)
        while len(filler.lengths) > 1:
            filler = filler.split()[1]  # without shared prefixes, rows are packed longest first
        return filler, False


def rounds_of(batches: Iterable[B], ranks: int) -> Iterator[Round[B]]:
    """Micro-batches dealt to the ranks, one each in a round."""
    left = iter(batches)
    while given := tuple(islice(left, ranks)):
        yield Round((*given, *[None] * (ranks - len(given))))


class MicroBatchSplitter:
    """Micro-batch splitting: one that runs out of memory comes back in two, and later ones are smaller.

        for batch in splitter.over(batches):
            try:
                passed(batch)  # a function of its own, so that no local variable outlives a failed pass
            except RuntimeError as error:
                splitter.retry(batch, error)

    A pass that runs out of memory must leave no trace. `max_tokens` stays at what fitted.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._waiting: list[Any] = []
        self._has_failed = False

    def over(self, micro_batches: Iterable[B]) -> Iterator[B]:
        """Each of them, or its pieces. They may have been made before the limit fell."""
        for micro_batch in micro_batches:
            self._waiting = [micro_batch]
            while self._waiting:
                batch = self._waiting.pop()
                if self._has_failed:  # the error, whose frames held the pass's tensors, is gone by now
                    free_cached_memory()
                    self._has_failed = False
                if len(batch.lengths) > 1 and batch.computed > self.max_tokens:
                    self._waiting += reversed(batch.split())
                else:
                    yield batch

    def retry(self, batch: MicroBatch, error: RuntimeError, *, needs_less: bool = False) -> None:
        """Put a batch that ran out of memory back in two; other errors are raised again.

        A single row cannot be split: it is tried once more where the next attempt `needs_less` memory.
        """
        if not is_out_of_memory(error):
            raise error
        self._has_failed = True
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if len(batch.lengths) > 1:
            size, halves = batch.computed, batch.split()
            self.max_tokens = max(1, min(self.max_tokens, size) // 2)
            if size < sum(
                batch.lengths
            ):  # both halves have what they share, so they are more than half of it
                self.max_tokens = max(self.max_tokens, *(half.computed for half in halves))
            self._waiting += reversed(halves)
            log.warning(
                "a pass over %d tokens ran out of memory (%s); passes have at most %d from now on: set "
                "optimizer.micro_batch_tokens to that to do without the failed attempt",
                size,
                reason,
                self.max_tokens,
            )
        elif needs_less:
            self._waiting.append(batch)
        else:
            raise LudusError(
                f"a single row of {batch.lengths[0]} tokens does not fit into memory ({reason}): "
                "limit the length of episodes (their turns, or the tokens of a turn), or train a "
                "smaller model or an adapter"
            ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory is full; libraries below torch say so in words alone."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = str(error).lower()
    return "out of memory" in words or "cublas_status_alloc_failed" in words


def free_cached_memory() -> None:
    """Give cached blocks back to the device, so that the next attempt finds whole ones."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
