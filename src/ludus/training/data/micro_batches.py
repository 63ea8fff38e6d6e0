"""Micro-batches: which rows are computed together, which of their prefixes once, and their tensors.

Rows that begin alike are folded into a prefix forest:

    row 0    p p p p a a           node 0   p p p p       parent -1     rows 0, 1, 2
    row 1    p p p p b b c    =>   node 1   a a           parent 0      row 0
    row 2    p p p p b b d         node 2   b b           parent 0      rows 1, 2
                                   nodes 3, 4   c, d      parent 2      row 1, row 2

Losses refer to the tokens of rows. A fold maps each to a computed token, whose hidden state is the same: it
depends on the tokens before it alone. Tokens are compared, not where they come from; an image's first one by
its hash. Prefixes are shared in whole blocks: a few tokens are not worth a node.

For one rank, packing is best-fit decreasing: rows, or bundles of rows that share a prefix, are placed longest
first, each into the fullest micro-batch that still has room. For several ranks, which wait for each other in
every round, all micro-batches are made about equally large instead, and their number is a multiple of the
ranks'. Every rank finds the same packing by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.core.messages import MediaSpan
from ludus.kernels import arrays_to_device
from ludus.training.data.batch import Batch

Ints = npt.NDArray[np.int64]

BLOCK = 16
"""Prefixes are shared in so many tokens, or in a multiple of that."""
_SHORTEST = 48
"""A prefix of fewer tokens is not shared: on a CPU, masked attention costs more than they save."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Rows as a forest: T tokens of all rows, U of them computed."""

    index_T: Ints
    """Where each token of the rows is among the computed ones."""
    source_U: Ints
    """Source index of each unique token: its first occurrence in the rows."""
    lengths: list[int]
    """The tokens of each node."""
    parents: list[int]
    """The node before each, or -1."""
    own_R: Ints
    """Number of tokens of each row that no earlier row has."""

    @classmethod
    def of(cls, keys: Sequence[Ints]) -> Fold | None:
        """Fold rows, given a number for each token, equal where tokens are; None where no two begin alike."""
        # Sorted, rows with a common prefix are neighbours, and common[i] is what row order[i] shares with the
        # one before it. So a run of neighbours is a subtree: rows first..stop whose common values exceed
        # `depth` share at least the smallest of these values, and that prefix (from depth on) is one node.
        # Below the node the run is cut again where a common value is not larger than the node's end.
        order, common = sorted_by_prefix(keys)
        if not any(common):
            return None
        starts = np.cumsum([0, *(len(key) for key in keys)])
        index_T = np.empty(starts[-1], dtype=np.int64)
        lengths: list[int] = []
        parents: list[int] = []
        computed = 0
        waiting = [
            (0, len(keys), 0, -1)
        ]  # (first row, last + 1, tokens above, node above), in sorted order
        while waiting:
            first, stop, depth, parent = waiting.pop()
            for begin, end in _runs(common, first, stop, depth):
                upto = min(common[begin + 1 : end]) if end - begin > 1 else len(keys[order[begin]])
                if upto == depth:
                    continue  # the row ends with the node before
                for row in order[
                    begin:end
                ]:  # the node's tokens are these rows' tokens from depth to upto
                    place = starts[row]
                    index_T[place + depth : place + upto] = np.arange(computed, computed + upto - depth)
                if end - begin > 1:
                    waiting.append((begin, end, upto, len(lengths)))
                lengths.append(upto - depth)
                parents.append(parent)
                computed += upto - depth
        # source index of each unique token: unique() returns first occurrences
        source_U = np.unique(index_T, return_index=True)[1]
        own_R = np.bincount(np.searchsorted(starts, source_U, side="right") - 1, minlength=len(keys))
        return cls(index_T, source_U, lengths, parents, own_R)

    @property
    def computed(self) -> int:
        """The tokens that are computed."""
        return len(self.source_U)

    def part(self, first: int, lengths: Sequence[int]) -> Fold | None:
        """The fold of some rows, of these lengths, the first of which begins at the token `first`."""
        index_T = self.index_T[first : first + sum(lengths)]
        return Fold.of(np.split(index_T, np.cumsum(lengths)[:-1]))


def sorted_by_prefix(keys: Sequence[Ints]) -> tuple[list[int], list[int]]:
    """Rows in an order in which those that begin alike are neighbours, and what each shares with the last.

    The tokens' bytes are compared, which is an order as good as any, and fast.
    """
    words = [key.tobytes() for key in keys]
    order = sorted(range(len(keys)), key=words.__getitem__)
    shared = [_shared(keys[one], keys[other]) for one, other in pairwise(order)]
    return order, [0, *shared][: len(order)]


def _shared(one: Ints, other: Ints) -> int:
    """How many leading tokens two rows share."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    common = int(differs.argmax()) if differs.any() else size
    return common // BLOCK * BLOCK if common >= _SHORTEST else 0


def _runs(common: Sequence[int], first: int, stop: int, depth: int) -> Iterator[tuple[int, int]]:
    """Neighbours from `first` to `stop` that have more than `depth` tokens in common."""
    begin = first
    for place in range(first + 1, stop + 1):
        if place == stop or common[place] <= depth:
            yield begin, place
            begin = place


def row_keys(
    tokens: Sequence[Sequence[int] | Ints], images: Sequence[Sequence[MediaSpan]]
) -> list[Ints]:
    """The tokens of each row; a number below 0 for an image, at its first token."""
    known: dict[str, int] = {}
    keys = [np.array(row, dtype=np.int64) for row in tokens]
    for key, spans in zip(keys, images, strict=True):
        for span in spans:
            key[span.start] = -1 - known.setdefault(span.sha256, len(known))
    return keys


def computed_tokens(keys: Sequence[Ints]) -> int:
    """Number of tokens computed for these rows: shared prefixes count once."""
    return sum(map(len, keys)) - sum(sorted_by_prefix(keys)[1])


@dataclass(slots=True)
class Bundle:
    """Rows that travel together because they begin alike, and the tokens that are computed for them."""

    rows: list[int]
    size: int


def bundles_of(keys: Sequence[Ints], limit: int) -> list[Bundle]:
    """Rows that begin alike together, with at most `limit` computed tokens; what is more is cut between rows.

    A row that begins like no other is a bundle of its own, and so is one that is longer than that.
    """
    order, common = sorted_by_prefix(keys)
    bundles: list[Bundle] = []
    for row, shared in zip(order, common, strict=True):
        added = len(keys[row]) - shared
        if shared and bundles[-1].size + added <= limit:
            bundles[-1].rows.append(row)
            bundles[-1].size += added
        else:
            bundles.append(Bundle([row], len(keys[row])))
    return sorted(bundles, key=lambda bundle: min(bundle.rows))


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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of a batch end to end: T tokens, A of them trained. Each was predicted from the position before it.

    Where rows share prefixes, a forward pass computes U tokens, fewer than T: see `Fold`.
    """

    lengths: list[int]
    """The tokens of each row."""
    tokens_T: Tensor
    trained_index_A: Tensor
    """The positions of the trained tokens among the T."""
    source_index_A: Tensor
    """The positions of the trained tokens among those of the batch."""
    row_A: Tensor
    """The row of the micro-batch in which each trained token lies."""
    rollout_logprobs_A: Tensor
    old_logprobs_A: Tensor
    advantages_A: Tensor
    weights_A: Tensor
    fold: Fold | None = None
    """Which prefixes the rows share and a pass computes once; None where they share none."""
    images: tuple[MediaSpan, ...] = ()
    """Which of the T tokens stand for images."""

    @property
    def computed(self) -> int:
        """The tokens that a pass computes."""
        return sum(self.lengths) if self.fold is None else self.fold.computed

    @property
    def actions(self) -> Tensor:
        """The trained tokens themselves."""
        return self.tokens_T[self.trained_index_A]

    def to(self, device: torch.device) -> MicroBatch:
        """The tensors on a device, in one copy. The fold stays on the host."""
        names = [one.name for one in fields(self) if isinstance(getattr(self, one.name), Tensor)]
        there = _all_to_device([getattr(self, name) for name in names], device)
        return replace(self, **dict(zip(names, there, strict=True)))  # type: ignore[arg-type]

    def split(self) -> tuple[MicroBatch, MicroBatch]:
        """Two micro-batches of whole rows, of about as many tokens each."""
        row, place = split_point(self.lengths, None if self.fold is None else self.fold.own_R.tolist())
        return self._part(slice(0, row), 0, place), self._part(
            slice(row, None), place, len(self.tokens_T)
        )

    def _part(self, rows: slice, start: int, stop: int) -> MicroBatch:
        """The rows whose tokens are those from `start` to `stop`."""
        lengths = self.lengths[rows]
        inside_A = (self.trained_index_A >= start) & (self.trained_index_A < stop)
        return MicroBatch(
            lengths=lengths,
            tokens_T=self.tokens_T[start:stop],
            trained_index_A=self.trained_index_A[inside_A] - start,
            source_index_A=self.source_index_A[inside_A],
            row_A=self.row_A[inside_A] - rows.start,
            rollout_logprobs_A=self.rollout_logprobs_A[inside_A],
            old_logprobs_A=self.old_logprobs_A[inside_A],
            advantages_A=self.advantages_A[inside_A],
            weights_A=self.weights_A[inside_A],
            fold=None if self.fold is None else self.fold.part(start, lengths),
            images=tuple(span.moved(-start) for span in self.images if start <= span.start < stop),
        )


def micro_batches(
    batch: Batch,
    budget: int,
    rows: Sequence[int] | None = None,
    ranks: int = 1,
    *,
    share: bool = False,
) -> Iterator[MicroBatch]:
    """These rows of a batch (all when left out), packed; a row without a trained token is left out.

    With `share`, a prefix that rows of a micro-batch share is computed once.
    """
    numbers = batch.rows_with(batch.trained_T, rows)
    lengths = batch.lengths
    ends = list(accumulate(lengths, initial=0))
    tokens = batch.tokens_T.numpy()
    keys: list[Ints] = []
    if share:
        images = [batch.images_of(ends[i], lengths[i]) for i in numbers]
        keys = row_keys([tokens[ends[i] : ends[i + 1]] for i in numbers], images)
        packed = shared_micro_batches_of(keys, budget, ranks)
    else:
        packed = micro_batches_of([lengths[i] for i in numbers], budget, ranks)
    for part in packed:
        fold: Fold | None = None
        if share:
            order, common = sorted_by_prefix([keys[i] for i in part])
            if any(common):
                part = [part[i] for i in order]  # halves then have whole subtrees
                fold = Fold.of([keys[i] for i in part])
        yield _micro_batch(batch, [numbers[i] for i in part], ends, fold)


def _micro_batch(
    batch: Batch, rows: Sequence[int], ends: Sequence[int], fold: Fold | None
) -> MicroBatch:
    """These rows of a batch, whose tokens begin and end at `ends`."""
    lengths = [ends[i + 1] - ends[i] for i in rows]
    source_T = torch.from_numpy(np.concatenate([np.arange(ends[i], ends[i + 1]) for i in rows]))
    trained_index_A = take_rows(batch.trained_T, source_T).nonzero().squeeze(1)
    source_A = take_rows(source_T, trained_index_A)
    row_T = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
    starts = accumulate(lengths, initial=0)
    placed = zip(rows, starts, lengths, strict=False)
    return MicroBatch(
        lengths=lengths,
        tokens_T=take_rows(batch.tokens_T, source_T),
        trained_index_A=trained_index_A,
        source_index_A=source_A,
        row_A=take_rows(row_T, trained_index_A),
        rollout_logprobs_A=take_rows(batch.rollout_logprobs_T, source_A),
        old_logprobs_A=take_rows(batch.old_logprobs_T, source_A),
        advantages_A=take_rows(batch.advantages_T, source_A),
        weights_A=take_rows(batch.weights_T, source_A),
        fold=fold,
        images=tuple(span.moved(at) for i, at, n in placed for span in batch.images_of(ends[i], n)),
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device. Copies to a GPU go through pinned memory: others wait until the GPU has caught up."""
    return _all_to_device([tensor], device)[0]


def _all_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    return arrays_to_device([tensor.numpy() for tensor in tensors], device)


def take_rows(values_T: Tensor, place_A: Tensor) -> Tensor:
    """values_T[place_A], on the host; half precision becomes float32."""
    values_T = values_T.detach()
    if values_T.dtype in (torch.bfloat16, torch.float16):  # numpy knows one of them alone
        values_T = values_T.float()
    return torch.from_numpy(values_T.numpy()[place_A.numpy()])
