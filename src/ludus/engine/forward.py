"""Running a decoder on flat tokens: by the fused forward where it fits, by the module's own elsewhere."""

from __future__ import annotations

import logging

from torch import Tensor, nn

from ludus.engine.attention import CONTEXT, AttentionContext
from ludus.engine.backbone import decoder_of, embedding_device
from ludus.engine.fused import Blueprint, blueprint_of, fused_hidden_states, unrecognised
from ludus.engine.recompute import recomputed_layers
from ludus.kernels import unavailable

log = logging.getLogger(__name__)


def hidden_states(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor, context: AttentionContext
) -> Tensor:
    """[T, hidden]: the decoder's last hidden states of flat tokens [T] in an attention context."""
    blueprint = _fused(model)
    if blueprint is not None:
        recomputed = recomputed_layers(model)
        return fused_hidden_states(blueprint, input_ids, position_ids, context, recomputed)
    return stock_hidden_states(model, input_ids, position_ids, context)


def stock_hidden_states(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor, context: AttentionContext
) -> Tensor:
    """[T, hidden]: the same by the module's own forward."""
    output = decoder_of(model)(
        input_ids=input_ids[None],
        position_ids=position_ids.reshape(1, -1),
        use_cache=False,
        **{CONTEXT: context},
    )
    states: Tensor = output.last_hidden_state.squeeze(0)
    return states


def why_not_fused(model: nn.Module) -> str | None:
    """Why the module's own forward is used; None when the fused one is."""
    return unavailable(embedding_device(model)) or unrecognised(decoder_of(model))


def _fused(model: nn.Module) -> Blueprint | None:
    if unavailable(embedding_device(model)) is not None:
        return None
    return blueprint_of(decoder_of(model))
