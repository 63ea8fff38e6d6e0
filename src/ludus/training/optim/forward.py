"""The decoder's pass over a micro-batch: its rows end to end, or folded into a prefix forest."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ludus.kernels import arrays_to_device
from ludus.model import ForestContext, PackedContext, can_share_prefixes, hidden_states
from ludus.model.image_features import PlacedFeatures, placed_features, with_features
from ludus.training.data.micro_batches import MicroBatch
from ludus.training.optim.sharding import group_of


def packed_states(
    model: nn.Module, batch: MicroBatch, placed: PlacedFeatures | None = None
) -> tuple[Tensor, Tensor | None]:
    """(hidden_UD, index_T): the last hidden states, and where each token of the rows is among them.

    The index is None where every token was computed, in order. A token of a shared prefix has the hidden state
    that was computed for all of its rows.

    Args:
        model: The model, or the part that has its decoder.
        batch: The micro-batch, on the model's device.
        placed: The features of the images, where they are another model's than this one's.
    """
    device = batch.tokens_T.device
    if placed is None:
        placed = placed_features(model, batch.images)
    embedded_D = with_features(model, batch.tokens_T, placed)
    if batch.fold is None:
        packed = PackedContext(batch.lengths, device)
        return hidden_states(model, batch.tokens_T, packed.position_ids, packed, embedded_D), None
    index_T, source_U = (
        arrays_to_device([one], device)[0] for one in (batch.fold.index_T, batch.fold.source_U)
    )
    forest = ForestContext(batch.fold.lengths, batch.fold.parents, device)
    tokens_U = batch.tokens_T.index_select(0, source_U)
    if embedded_D is not None:
        embedded_D = embedded_D.index_select(0, source_U)
    return hidden_states(model, tokens_U, forest.position_ids, forest, embedded_D), index_T


def at_places(values_U: Tensor, index_T: Tensor | None, place_A: Tensor) -> Tensor:
    """Gather values of the unique tokens at places in the rows: values_U[index_T[place_A]]."""
    return values_U.index_select(0, place_A if index_T is None else index_T.index_select(0, place_A))


_shares: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def shares_prefixes(model: nn.Module) -> bool:
    """Whether rows that begin alike may be folded for this model; all ranks do the same."""
    if model not in _shares:
        _shares[model] = bool(group_of(model).least(int(can_share_prefixes(model))))
    return _shares[model]
