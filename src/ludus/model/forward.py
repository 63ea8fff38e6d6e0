"""A forward pass of the model on flat tokens, for the engine and for the trainer.

Decoder and LM head are apart, because log-probabilities are computed in chunks of rows, never for a whole batch
at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ludus.kernels import linear_float32, unavailable
from ludus.model.attention import CONTEXT, AttentionContext
from ludus.model.fused_model import decoder_parts, fused_hidden_states, unsupported
from ludus.model.hf_model import checkpointed_layers, decoder_of, device_of, text_config, unwrapped

# What an architecture may do to its logits after the product.
_SCALES = ("logit_scale", "lm_head_multiplier", "logits_scaling")
_CAP = "final_logit_softcapping"


def plain_head(model: nn.Module) -> nn.Linear | None:
    """The LM head, if it is one matrix product and nothing else."""
    head, config = unwrapped(model).get_output_embeddings(), text_config(model)
    shapes = getattr(config, _CAP, None) is not None or any(
        _number(config, name) != 1 for name in _SCALES
    )
    # a subclass, or an adapter's wrapper, may do more than a product
    is_product = type(head) is nn.Linear and getattr(head, "bias", None) is None
    return head if is_product and not shapes else None


def head_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., H], scaled and capped as the model's own forward does."""
    inner, config = unwrapped(model), text_config(model)
    head = inner.get_output_embeddings()
    logits: Tensor = linear_float32(hidden, head.weight) if _is_exact(head, hidden) else head(hidden)
    raised, multiplied, lowered = (_number(config, name) for name in _SCALES)
    scale = raised * multiplied / lowered
    if scale != 1:
        logits = logits * scale
    cap = getattr(config, _CAP, None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _is_exact(head: Any, hidden: Tensor) -> bool:
    """Whether float32 logits cost nothing: a plain head in half precision, without gradients, on a GPU."""
    return (
        isinstance(head, nn.Linear)
        and getattr(head, "bias", None) is None
        and hidden.ndim == 2
        and hidden.device.type == "cuda"
        and hidden.dtype != torch.float32
        and not torch.is_grad_enabled()
    )


def _number(config: object, name: str) -> float:
    value = getattr(config, name, None)
    return 1.0 if value is None else float(value)


def hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    context: AttentionContext,
    embedded_TH: Tensor | None = None,
) -> Tensor:
    """[T, hidden]: the decoder's last hidden states of flat tokens [T]; the fused forward where it fits.

    `embedded_TH` is read in the place of the tokens' embeddings, where there are images.
    """
    parts = None if unavailable(device_of(model)) else decoder_parts(decoder_of(model))
    if parts is not None:
        checkpointed = checkpointed_layers(model)
        return fused_hidden_states(parts, input_ids, position_ids, context, checkpointed, embedded_TH)
    return stock_hidden_states(model, input_ids, position_ids, context, embedded_TH)


def stock_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    context: AttentionContext,
    embedded_TH: Tensor | None = None,
) -> Tensor:
    """[T, hidden]: the same by the Hugging Face module's own forward."""
    read = (
        {"input_ids": input_ids[None]} if embedded_TH is None else {"inputs_embeds": embedded_TH[None]}
    )
    output = decoder_of(model)(
        **read,
        position_ids=position_ids.reshape(1, -1),
        use_cache=False,
        **{CONTEXT: context},
    )
    states: Tensor = output.last_hidden_state.squeeze(0)
    return states


def why_not_fused(model: nn.Module) -> str | None:
    """Why the module's own forward is used; None when the fused one is."""
    return unavailable(device_of(model)) or unsupported(decoder_of(model))
