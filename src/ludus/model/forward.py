"""A forward pass of the model on flat tokens, and the one attention function that serves it.

Decoder and LM head are apart, because log-probabilities are computed in chunks of rows, never for a whole batch
at once. `ludus_attention` is registered with transformers under the name "ludus"; the context that travels down
the module's forward as the keyword argument of that name decides what it does, and without one it is ordinary
causal attention, so that `model(...)` and `model.generate(...)` still work. Some models do not hand keyword
arguments down: for their modules the context is also that of the thread (`running`), which activation
checkpointing restores for its recomputation, on whatever thread that runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ludus.core.failures import ConfigError
from ludus.kernels import linear_float32, unavailable
from ludus.model.attention import (
    AttentionContext,
    AttentionParams,
    attend,
    causal_mask,
    current_context,
    current_positions,
    running,
)
from ludus.model.fused_model import decoder_parts, fused_hidden_states, unsupported
from ludus.model.hf_model import (
    checkpointed_layers,
    decoder_of,
    device_of,
    rows_alone,
    text_config,
    unwrapped,
)
from ludus.model.packed_attention import PackedContext

NAME = "ludus"
CONTEXT = "ludus_attention"
INSTEAD = "Use a model of a family with plain, sliding, chunked or latent attention (docs/models.md lists them)"

# What models hand down that has no bearing on how tokens attend.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "logits_to_keep",
    }
)

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


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """What a decoder reads in the place of its tokens' embeddings, where there are images."""

    embedded_TH: Tensor
    others: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its forward: features for deeper layers, embeddings for each layer."""


def hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    context: AttentionContext,
    inputs: DecoderInputs | None = None,
) -> Tensor:
    """[T, hidden]: the decoder's last hidden states of flat tokens [T]; the fused forward where it fits.

    `position_ids` are [T], or [3, T] where tokens of images have positions in three dimensions.
    """
    parts = None if why_not_fused(model) else decoder_parts(decoder_of(model))
    if parts is not None and (inputs is None or not inputs.others):
        embedded_TH = None if inputs is None else inputs.embedded_TH
        checkpointed = checkpointed_layers(model)
        return fused_hidden_states(parts, input_ids, position_ids, context, checkpointed, embedded_TH)
    return stock_hidden_states(model, input_ids, position_ids, context, inputs)


def stock_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    context: AttentionContext,
    inputs: DecoderInputs | None = None,
) -> Tensor:
    """[T, hidden]: the same by the Hugging Face module's own forward."""
    if rows_alone(model) is not None:
        return _row_by_row(model, input_ids, context, inputs)
    read: dict[str, Any] = (
        {"input_ids": input_ids[None]}
        if inputs is None
        else {"inputs_embeds": inputs.embedded_TH[None], **inputs.others}
    )
    is_spatial = position_ids.ndim == 2 and len(position_ids) == 3
    with running(context, position_ids[0] if is_spatial else position_ids):
        output = decoder_of(model)(
            **read,
            position_ids=position_ids[:, None] if is_spatial else position_ids.reshape(1, -1),
            use_cache=False,
            **{CONTEXT: context},
        )
    states: Tensor = output.last_hidden_state.squeeze(0)
    return states


def _row_by_row(
    model: nn.Module, input_ids: Tensor, context: AttentionContext, inputs: DecoderInputs | None
) -> Tensor:
    """[T, hidden]: one pass for each packed row, from its first token on, with nothing of Ludus in it."""
    if not isinstance(context, PackedContext) or context.shares_tokens or inputs is not None:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} is run row by row, which is for whole rows of text alone"
        )
    states = [
        decoder_of(model)(input_ids=row[None], use_cache=False).last_hidden_state[0]
        for row in torch.split(input_ids, context.lengths)
    ]
    return torch.cat(states)


def why_not_fused(model: nn.Module) -> str | None:
    """Why the module's own forward is used; None when the fused one is."""
    return rows_alone(model) or unavailable(device_of(model)) or unsupported(decoder_of(model))


# Attention as transformers calls it.


def ludus_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    ludus_attention: AttentionContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it."""
    layer, name = getattr(module, "layer_idx", None), type(module).__name__
    for given, argument in others.items():
        if given not in _HARMLESS and argument is not None and argument is not False:
            raise ConfigError(
                f"layer {layer} ({name}) asks its attention for {given!r}, which Ludus does not compute: "
                f"such a model cannot be trained or sampled here. {INSTEAD}"
            )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{name} is not causal; Ludus runs causal models only")
    params = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
        chunk=_chunk(module),
        sinks=s_aux,
    )
    context = current_context() if ludus_attention is None else ludus_attention
    if context is None:
        positions = others.get("position_ids")
        return _attend_without_context(query, key, value, attention_mask, params, positions), None
    if layer is None:
        raise ConfigError(f"{name} does not say which layer it is (layer_idx)")
    if attention_mask is not None:
        raise SparseAttentionError(
            f"layer {layer} ({name}) chooses what its tokens see by a mask of its own, as sparse attention "
            f"does, which would be wrong for packed and cached tokens. {INSTEAD}"
        )
    return context.attend(layer, _tuned(module, query), key, value, params), None


class SparseAttentionError(ConfigError):
    """Tokens choose what they see: rounding decides between equal scores, so no other computation is exact."""


def _chunk(module: nn.Module) -> int | None:
    """The chunk of a layer whose attention is chunked: architectures put it into the mask alone."""
    config: Any = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if not kinds or layer is None or kinds[layer] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)


def _tuned(module: Any, query: Tensor) -> Tensor:
    """Queries of Llama 4's layers without positions, scaled by where they stand.

    Its attention counts positions from the first token that it is given, which is right for one sequence alone.
    """
    positions = current_positions()
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    if positions is None:
        raise ConfigError(
            f"{type(module).__name__} needs positions: run it by ludus.model.hidden_states"
        )
    counted = torch.arange(query.shape[2], device=query.device)
    right, given = (
        torch.log1p(torch.floor((places.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        for places in (positions.reshape(-1), counted)
    )
    tuned: Tensor = query.float() * (right / given)[:, None]
    return tuned.to(query.dtype)


def _attend_without_context(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    params: AttentionParams,
    positions: Tensor | None,
) -> Tensor:
    """Attention without a context, as any implementation of transformers does it."""
    if mask is None:
        _refuse_packed(positions)
        if params.is_cut(key.shape[2]):
            mask = causal_mask(query.shape[2], key.shape[2], params, query.device)
    elif mask.dtype != torch.bool:
        raise ConfigError("a custom attention mask must be boolean (true: may be looked at)")
    return attend(query, key, value, params, mask).transpose(1, 2).contiguous()


def _refuse_packed(positions: Tensor | None) -> None:
    if positions is not None and positions.shape[-1] > 1 and not bool((positions.diff() == 1).all()):
        raise ConfigError(
            "position_ids that start anew mean packed sequences: pass ludus_attention=PackedContext(...)"
        )


def ludus_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> Tensor | None:
    """None where a context or causal attention needs no mask; transformers' own for padding and caches, and
    where a model lets tokens see what stands behind them, as those of an image.
    """
    is_plain = attention_mask is None and q_length == kv_length
    if current_context() is not None or (is_plain and arguments.get("allow_is_causal_skip", True)):
        return None
    arguments["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        **arguments,
    )
    return None if is_plain and mask is not None and not bool(mask.triu(1).any()) else mask


AttentionInterface.register(NAME, ludus_attention)
AttentionMaskInterface.register(NAME, ludus_mask)
