"""The gradient of a step, summed in float32 over its micro-batches, each of which counts once.

A parameter's gradient is taken away as soon as the backward pass has finished it. The first one is kept as it
is; a second one makes it a float32 sum, in which small gradients are not lost among large ones. That happens in
a hook, on the thread of the backward pass, while the caller waits for that pass to return.

A backward pass can run out of memory in its midst, when some parameters have been served. These are noted, and
when the micro-batch is tried again, whole or in halves, they take no second helping.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


class GradientSum:
    """The sums so far, for each of some parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._totals: dict[nn.Parameter, Tensor] = {}
        self._is_hooked = self._is_collecting = False
        self._served: set[nn.Parameter] = set()
        """Those that have had the gradient of the micro-batch that is being tried."""
        self._skipped: frozenset[nn.Parameter] = frozenset()
        """Those that had it in an attempt that failed later on."""

    def clear(self) -> None:
        """Forget everything, and free it."""
        self._totals = {}
        for parameter in self.parameters:
            parameter.grad = None

    def in_order(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parameters that got a gradient, and the sums, which are given away one by one.

        The gradient of a single micro-batch is as it was found; of several, it is their sum in float32.
        """
        return ((p, self._totals.pop(p)) for p in self.parameters if p in self._totals)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While this lasts, what backward passes find goes into the sums."""
        if not self._is_hooked:
            self._hook()
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False

    def _hook(self) -> None:
        """Once, and not for each step, which would take milliseconds; the hooks go when the sums do."""
        own = weakref.ref(self)

        def take(parameter: Tensor) -> None:
            sums = own()
            if sums is not None and sums._is_collecting:
                sums._take(parameter)

        parameters: list[Any] = list(self.parameters)
        hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
        weakref.finalize(self, _remove, hooks)
        self._is_hooked = True

    def begin(self, skipped: frozenset[nn.Parameter] = frozenset()) -> None:
        """Before an attempt at a micro-batch; `skipped` have had its gradient already."""
        self._served = set()
        self._skipped = skipped

    def served(self) -> frozenset[nn.Parameter]:
        """After an attempt that failed: who has had the micro-batch's gradient by now."""
        for parameter in self.parameters:
            parameter.grad = None  # one that was finished when memory ran out, and not yet taken
        return self._skipped | self._served

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or parameter in self._skipped:
            return
        total = self._totals.get(parameter)
        self._totals[parameter] = gradient if total is None else total.float().add_(gradient)
        self._served.add(parameter)
