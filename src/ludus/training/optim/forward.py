"""What the forward pass takes of a micro-batch: the tokens to compute, and where a row's are among them."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ludus.engine import ForestContext, PackedContext, can_share_prefixes, hidden_states
from ludus.kernels import arrays_to_device
from ludus.training.data.packing import Pack, PackedRows, to_device
from ludus.training.optim.sharding import group_of


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The tokens that are computed, U of them, and what each attends to."""

    tokens_U: Tensor
    context: PackedContext
    index_T: Tensor | None
    """Where each token of the rows is among them; None where they are the same."""

    @classmethod
    def of(cls, batch: Pack | PackedRows, device: torch.device) -> ForwardInputs:
        tokens_T, fold = to_device(batch.tokens_T, device), batch.fold
        if fold is None:
            return cls(tokens_T, PackedContext(batch.lengths, device), None)
        index_T, source_U = (arrays_to_device([one], device)[0] for one in (fold.index_T, fold.source_U))
        context = ForestContext(fold.lengths, fold.parents, device)
        return cls(tokens_T.index_select(0, source_U), context, index_T)

    def at(self, place_A: Tensor) -> Tensor:
        """Where these tokens of the rows are among those that are computed."""
        return place_A if self.index_T is None else self.index_T.index_select(0, place_A)

    def for_rows(self, values_U: Tensor) -> Tensor:
        """Values of the computed tokens for each token of the rows."""
        return values_U if self.index_T is None else values_U.index_select(0, self.index_T)


def packed_states(model: nn.Module, inputs: ForwardInputs) -> Tensor:
    """[U, hidden]: the last hidden states of the tokens that are computed."""
    return hidden_states(model, inputs.tokens_U, inputs.context.position_ids, inputs.context)


_shares: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def shares_prefixes(model: nn.Module) -> bool:
    """Whether rows that begin alike may be folded for this model; all ranks do the same."""
    if model not in _shares:
        _shares[model] = bool(group_of(model).least(int(can_share_prefixes(model))))
    return _shares[model]
