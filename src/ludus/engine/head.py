"""The language-model head on hidden states, with whatever the architecture does to its logits.

Log-probabilities are computed in chunks of rows, never for a whole batch at once, so the head is applied
apart from the decoder. `probe_head` makes sure that this gives what the model itself would give.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.engine.backbone import decoder_of, sampling_mode, text_config, unwrapped
from ludus.engine.probing import agree, probe_tokens
from ludus.kernels import linear_float32

# What an architecture may do to its logits after the product.
_SCALES = ("logit_scale", "lm_head_multiplier", "logits_scaling")
_CAP = "final_logit_softcapping"


def plain_head(model: nn.Module) -> nn.Linear | None:
    """The head, where it is one product and nothing else."""
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
    """Whether the logits can be had in float32 at no cost: a plain head in half precision, for sampling."""
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


def probe_head(model: nn.Module) -> None:
    """Refuse a model whose logits are not `head_logits` of its decoder's hidden states."""
    inner = unwrapped(model)
    tokens = probe_tokens(model, 4)[None]
    with torch.no_grad(), sampling_mode(model):
        expected = inner(input_ids=tokens, use_cache=False).logits
        hidden = decoder_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
        given = head_logits(model, hidden)
    if not agree(given, expected):
        raise ConfigError(
            f"{type(inner).__name__} does something to its logits that Ludus does not know: "
            "log-probabilities computed from its hidden states would be wrong, so it is refused"
        )
