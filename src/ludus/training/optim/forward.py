"""What the forward pass takes of a micro-batch: the tokens to compute, and where a row's are among them."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ludus.core.messages import MediaSpan
from ludus.kernels import arrays_to_device
from ludus.model import ForestContext, PackedContext, can_share_prefixes, hidden_states
from ludus.model.image_features import PlacedFeatures, placed_features, with_features
from ludus.training.data.packing import Pack, PackedRows, to_device
from ludus.training.optim.sharding import group_of


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The tokens that are computed, U of them, and what each attends to."""

    tokens_U: Tensor
    context: PackedContext
    tokens_T: Tensor
    """The tokens of the rows."""
    index_T: Tensor | None = None
    """Where each token of the rows is among the computed ones; None where they are the same."""
    source_U: Tensor | None = None
    """The token of the rows that each computed one stands for; likewise."""
    images: tuple[MediaSpan, ...] = ()
    """Where images stand, among the tokens of the rows."""

    @classmethod
    def of(cls, batch: Pack | PackedRows, device: torch.device) -> ForwardInputs:
        tokens_T, fold = to_device(batch.tokens_T, device), batch.fold
        if fold is None:
            context = PackedContext(batch.lengths, device)
            return cls(tokens_T, context, tokens_T, images=batch.images)
        index_T, source_U = (arrays_to_device([one], device)[0] for one in (fold.index_T, fold.source_U))
        forest = ForestContext(fold.lengths, fold.parents, device)
        tokens_U = tokens_T.index_select(0, source_U)
        return cls(tokens_U, forest, tokens_T, index_T, source_U, batch.images)

    def at(self, place_A: Tensor) -> Tensor:
        """Where these tokens of the rows are among those that are computed."""
        return place_A if self.index_T is None else self.index_T.index_select(0, place_A)

    def for_rows(self, values_U: Tensor) -> Tensor:
        """Values of the computed tokens for each token of the rows."""
        return values_U if self.index_T is None else values_U.index_select(0, self.index_T)


def packed_states(
    model: nn.Module, inputs: ForwardInputs, placed: PlacedFeatures | None = None
) -> Tensor:
    """[U, hidden]: the last hidden states of the tokens that are computed.

    `placed` are the features of the images, where they are another model's than this one's.
    """
    if placed is None:
        placed = placed_features(model, inputs.images)
    embedded_D = with_features(model, inputs.tokens_T, placed)
    if embedded_D is not None and inputs.source_U is not None:
        embedded_D = embedded_D.index_select(0, inputs.source_U)
    context = inputs.context
    return hidden_states(model, inputs.tokens_U, context.position_ids, context, embedded_D)


_shares: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def shares_prefixes(model: nn.Module) -> bool:
    """Whether rows that begin alike may be folded for this model; all ranks do the same."""
    if model not in _shares:
        _shares[model] = bool(group_of(model).least(int(can_share_prefixes(model))))
    return _shares[model]
