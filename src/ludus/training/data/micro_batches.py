"""Micro-batches: packed rows as a forward pass takes them, spread over ranks, split where memory is short."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.failures import LudusError
from ludus.core.messages import MediaSpan
from ludus.kernels import arrays_to_device, free_cached_memory, is_out_of_memory
from ludus.training.data.batch import Batch
from ludus.training.data.packing import (
    Fold,
    Ints,
    micro_batches_of,
    row_keys,
    shared_micro_batches_of,
    sorted_by_prefix,
    split_point,
)
from ludus.training.optim.sharding import ALONE, RankGroup

log = logging.getLogger(__name__)


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


@dataclass(slots=True)
class Round:
    """Micro-batches that all ranks compute at the same time: one each, or None for a rank with none left.

    Every rank knows the whole round, so that all of them split it alike.
    """

    batches: tuple[MicroBatch | None, ...]
    added: frozenset[nn.Parameter] = frozenset()
    """Parameters that have its gradient already, from an attempt that ran out of memory later on."""

    @property
    def lengths(self) -> Sequence[int]:
        """Row lengths of the largest micro-batch, which decides whether a round can be split."""
        return self._largest.lengths

    @property
    def computed(self) -> int:
        return self._largest.computed

    @property
    def _largest(self) -> MicroBatch:
        return max((one for one in self.batches if one is not None), key=lambda one: one.computed)

    def split(self) -> tuple[Round, Round]:
        """Two rounds with a half of each micro-batch; one of a single row stays whole."""
        halves = [
            one.split() if one is not None and len(one.lengths) > 1 else (one, None)
            for one in self.batches
        ]
        first, second = (tuple(half[side] for half in halves) for side in (0, 1))
        return Round(first, self.added), Round(second, self.added)

    def of_rank(self, rank: int) -> tuple[MicroBatch, bool]:
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


def rounds_of(batches: Iterable[MicroBatch], group: RankGroup = ALONE) -> Iterator[Round]:
    """Micro-batches in rounds, one for each rank; all ranks must have made the same ones."""
    if group.size > 1:
        batches = list(batches)
        _compare(batches, group)
    left = iter(batches)
    while given := tuple(islice(left, group.size)):
        yield Round((*given, *[None] * (group.size - len(given))))


def _compare(batches: Sequence[MicroBatch], group: RankGroup) -> None:
    """Raise, on all ranks, where one of them is about to train something else than the others.

    Nothing else would show it: gradients are summed over whatever the ranks have.
    """
    number, sums, scales = digest_of(batches)
    most, least = group.largest(torch.tensor([number, -number])).tolist()
    if most == -least:
        rough = torch.tensor(sums, dtype=torch.float64)
        most_F, least_F = group.largest(torch.cat([rough, -rough])).chunk(2)
        scale_F = group.largest(torch.tensor(scales, dtype=torch.float64))
        if bool((most_F + least_F <= 1e-4 * scale_F + 1e-9).all()):
            return
    raise LudusError(
        "the trainer ranks do not have the same rows to train on, so that their gradients would not add up "
        "to those of one process: nothing was trained. This is a mistake in Ludus: please report it, and "
        "train with cluster.trainer_ranks=1 until then"
    )


def digest_of(batches: Iterable[MicroBatch]) -> tuple[int, list[float], list[float]]:
    """(number, sums, scales): a digest of micro-batches, by which ranks know whether they have the same ones.

    The number (62 bits) is of tokens, lengths and places, which are the same to the last bit. What was computed
    may differ by rounding where processors differ: of each column there is a sum with factors that depend on
    the place, and the sum of absolute values, the scale of its rounding.
    """
    counted = hashlib.sha256()
    sums: list[float] = []
    scales: list[float] = []

    def add(value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            column = value.detach().cpu().double().nan_to_num()
            counted.update(b"%d" % len(column))
            sums.append(float((column * torch.arange(len(column)).cos()).sum()))
            scales.append(float(column.abs().sum()))
        elif isinstance(value, Tensor):
            counted.update(value.detach().cpu().contiguous().numpy().tobytes())
        elif hasattr(value, "__dataclass_fields__"):
            for one in fields(value):
                add(getattr(value, one.name))
        elif isinstance(value, list | tuple):
            counted.update(b"%d[" % len(value))
            for one in value:
                add(one)
        else:
            counted.update(value if isinstance(value, bytes) else repr(value).encode())

    for batch in batches:
        add(batch)
    return int.from_bytes(counted.digest()[:8], "big") >> 2, sums, scales


class MicroBatchSplitter:
    """Micro-batch splitting: one that runs out of memory comes back in two, and later ones are smaller.

        for given in splitter.over(rounds):
            try:
                passed(given)  # a function of its own, so that no local variable outlives a failed pass
            except RuntimeError as error:
                splitter.retry(given, error)

    A pass that runs out of memory must leave no trace. `max_tokens` stays at what fitted.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._waiting: list[Round] = []
        self._has_failed = False

    def over(self, rounds: Iterable[Round]) -> Iterator[Round]:
        """Each of them, or its pieces. They may have been made before the limit fell."""
        for whole in rounds:
            self._waiting = [whole]
            while self._waiting:
                batch = self._waiting.pop()
                if self._has_failed:  # the error, whose frames held the pass's tensors, is gone by now
                    free_cached_memory()
                    self._has_failed = False
                if len(batch.lengths) > 1 and batch.computed > self.max_tokens:
                    self._waiting += reversed(batch.split())
                else:
                    yield batch

    def retry(self, batch: Round, error: RuntimeError, *, needs_less: bool = False) -> None:
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
