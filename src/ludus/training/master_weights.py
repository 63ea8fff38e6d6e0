"""Float32 copies of half-precision weights, which the optimizer updates in their stead.

bf16 has 8 bits of precision: an update smaller than about a 500th of a weight is rounded away, and at the
learning rates of fine-tuning nearly all of them are. So the optimizer owns a float32 master of each such
weight. After a step the masters are rounded into the module's own storage, in place: whoever knows its
addresses, such as a captured graph, reads the new weights. Float32 parameters are their own masters.

A master counts only as long as rounding it gives the weight. Where somebody else has changed the module in
place, by loading other weights into it, say, its value is the truth and the master starts again from there.
(Changes through `parameter.data`, which torch does not count, are not seen, and are undone by the next step.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_HALF = (torch.bfloat16, torch.float16)


class MasterWeights:
    """What an optimizer should update for some parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._half = [p for p in parameters if p.dtype in _HALF]
        self._masters: dict[nn.Parameter, Tensor] = {p: p.detach().float() for p in self._half}
        self._versions = self._current_versions()

    def of(self, parameter: nn.Parameter) -> Tensor:
        """What the optimizer updates: the parameter's master, or the parameter itself."""
        return self._masters.get(parameter, parameter)

    def adopt_changes(self) -> None:
        """Before a step: start again from weights that others have changed since the last one."""
        if self._current_versions() != self._versions:
            self._follow()

    @torch.no_grad()
    def write(self) -> None:
        """After a step: round the masters into the module."""
        if self._half:
            weights: list[Tensor] = list(self._half)
            torch._foreach_copy_(weights, self.state_dict())
            self._versions = self._current_versions()

    def state_dict(self) -> list[Tensor]:
        """The masters, in the order of the parameters."""
        return [self._masters[p] for p in self._half]

    @torch.no_grad()
    def load_state_dict(self, state: list[Tensor] | None) -> None:
        """Take up saved masters; None is a state from before there were any."""
        if state is not None and len(state) == len(self._half):
            for parameter, saved in zip(self._half, state, strict=True):
                self._masters[parameter].copy_(saved)
        self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        for parameter, master in self._masters.items():
            own = parameter.detach()
            torch.where(master.to(own.dtype) == own, master, own.float(), out=master)
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        """Counters that torch raises at every change in place."""
        return [p._version for p in self._half]
