"""Making a Hugging Face model attend through Ludus, and checking that nothing is lost on the way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.engine.attention import NAME
from ludus.engine.backbone import decoder_of, hidden_states, sampling_mode, unwrapped
from ludus.engine.head import agree, probe_head, probe_tokens
from ludus.engine.packed import PackedContext

_PROBE_LENGTHS = (5, 3)


def use_ludus_attention(model: nn.Module) -> None:
    """Switch `model` to the attention function of Ludus; refuse an architecture it does not fit.

    A short probe compares packed sequences with the architecture's own eager attention, sequence by
    sequence, and the head's logits with the model's. Calling it twice does no harm.
    """
    inner = unwrapped(model)
    decoder_of(model)
    if inner.config._attn_implementation == NAME:
        return
    before = inner.config._attn_implementation
    with torch.no_grad(), sampling_mode(model):
        try:
            inner.set_attn_implementation("eager")
            expected = _one_by_one(model)
            inner.set_attn_implementation(NAME)
            if inner.config._attn_implementation != NAME:
                raise ConfigError(
                    f"{type(inner).__name__} does not use the attention interface of transformers, "
                    "which Ludus needs to run it"
                )
            _compare(model, expected)
            probe_head(model)
        except BaseException:
            inner.set_attn_implementation(before)
            raise


def _one_by_one(model: nn.Module) -> Tensor:
    pieces = torch.split(probe_tokens(model, sum(_PROBE_LENGTHS)), list(_PROBE_LENGTHS))
    decoder = decoder_of(model)
    return torch.cat([decoder(input_ids=p[None], use_cache=False).last_hidden_state[0] for p in pieces])


def _compare(model: nn.Module, expected: Tensor) -> None:
    name = type(unwrapped(model)).__name__
    tokens = probe_tokens(model, sum(_PROBE_LENGTHS))
    context = PackedContext(_PROBE_LENGTHS, tokens.device)
    given = hidden_states(model, tokens, context.position_ids, context)
    if context.calls == 0:
        raise ConfigError(f"{name} does not hand keyword arguments down to its attention")
    if not agree(given, expected):
        raise ConfigError(
            f"{name} gives other hidden states with packed sequences than with each one alone: "
            "something in it mixes tokens besides causal attention"
        )
