"""Gradient accumulation: rounds of micro-batches over ranks, split where memory is short; sums of gradients."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.failures import LudusError
from ludus.kernels import free_cached_memory, is_out_of_memory
from ludus.training.data.micro_batches import (
    MicroBatch,
)
from ludus.training.optim.sharding import ALONE, RankGroup, local

log = logging.getLogger(__name__)


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


def measured(
    batches: Iterable[MicroBatch],
    max_tokens: int,
    group: RankGroup,
    device: torch.device,
    compute: Callable[[MicroBatch], Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute numbers of trained tokens, without gradient: (their places in the batch, the numbers).

    Each rank has those of its own micro-batches. The numbers are left on the device.
    """
    splitter = MicroBatchSplitter(max_tokens)
    for given in splitter.over(rounds_of(batches, group)):
        part, counts = given.of_rank(group.rank)
        try:
            values_A = compute(part.to(device))
            group.agree()
        except RuntimeError as error:
            group.tell(error)
            splitter.retry(given, error)
        else:
            if counts:
                yield part.source_index_A, values_A


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


class GradientAccumulator:
    """Gradient accumulation in float32 over micro-batches, each of which counts once.

    A hook takes a parameter's gradient away as soon as the backward pass has finished it (on the thread of the
    backward pass, while the caller waits). The first one is kept as it is; from the second on the sum is
    float32, so that small gradients are not rounded away.

    A backward pass can run out of memory when some parameters already have their gradient. They are noted, and
    skipped when the micro-batch is tried again, whole or split.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._totals: dict[nn.Parameter, Tensor] = {}
        self._is_hooked = self._is_collecting = False
        self._added: set[nn.Parameter] = set()
        """Parameters that have got the gradient of this attempt at a micro-batch."""
        self._skipped: frozenset[nn.Parameter] = frozenset()
        """Parameters that got it in an earlier attempt."""

    def clear(self) -> None:
        """Forget everything, and free it."""
        self._totals = {}
        for parameter in self.parameters:
            parameter.grad = None

    def in_order(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parameters that got a gradient, and their sums, which are given away one by one.

        The gradient of a single micro-batch has its own dtype; the sum of several is float32.
        """
        return ((p, self._totals.pop(p)) for p in self.parameters if p in self._totals)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While this lasts, gradients of backward passes go into the sums."""
        if not self._is_hooked:
            self._hook()
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False

    def begin_attempt(self, skipped: frozenset[nn.Parameter] = frozenset()) -> None:
        """Before a backward pass; `skipped` have the micro-batch's gradient already."""
        self._added = set()
        self._skipped = skipped

    def end_failed_attempt(self) -> frozenset[nn.Parameter]:
        """After a backward pass that failed: the parameters that have the micro-batch's gradient by now."""
        for parameter in self.parameters:
            parameter.grad = None  # one that was finished when memory ran out, and not yet taken
        return self._skipped | self._added

    def _hook(self) -> None:
        """Once: doing it for each step would take milliseconds. The hooks go when the accumulator does."""
        own = weakref.ref(self)

        def take(parameter: Tensor) -> None:
            sums = own()
            if sums is not None and sums._is_collecting:
                sums._take(parameter)

        parameters: list[Any] = list(self.parameters)
        hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
        weakref.finalize(self, _remove, hooks)
        self._is_hooked = True

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or parameter in self._skipped:
            return
        gradient = local(gradient)
        total = self._totals.get(parameter)
        self._totals[parameter] = gradient if total is None else total.float().add_(gradient)
        self._added.add(parameter)


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The length of all tensors together, in float32 whatever they are, and where the first of them is."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.device, tensor.dtype].append(tensor)
    norms = [n for group in alike.values() for n in torch._foreach_norm(group, 2.0, dtype=torch.float32)]
    if not norms:
        return torch.zeros(())
    together: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return together
