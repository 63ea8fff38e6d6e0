"""Gradients between the backward pass and the optimizer: their sums over micro-batches, and their norm."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ludus.training.optim.sharding import local


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
