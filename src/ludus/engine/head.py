"""The language-model head on hidden states, with whatever the architecture does to its logits.

Log-probabilities are computed in chunks of rows, never for a whole batch at once, so the head is applied
apart from the decoder. `probe_head` makes sure that this gives what the model itself would give.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.engine.backbone import decoder_of, sampling_mode, text_config, unwrapped, vocabulary_size


def head_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., H], scaled and capped as the model's own forward does."""
    inner, config = unwrapped(model), text_config(model)
    logits: Tensor = inner.get_output_embeddings()(hidden)
    scale = _number(config, "logit_scale") * _number(config, "lm_head_multiplier")
    scale /= _number(config, "logits_scaling")
    if scale != 1:
        logits = logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


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


def probe_tokens(model: nn.Module, count: int) -> Tensor:
    """A few arbitrary tokens of the model's vocabulary, on its device."""
    device = unwrapped(model).get_input_embeddings().weight.device
    return (torch.arange(count, device=device) * 7 + 3) % vocabulary_size(model)


def agree(given: Tensor, expected: Tensor) -> bool:
    """Whether two results of the same arithmetic are equal, as far as their precision allows."""
    if given.shape != expected.shape:
        return False
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    scale = max(1.0, float(expected.float().abs().max()))
    return float((given.float() - expected.float()).abs().max()) <= tolerance * scale
