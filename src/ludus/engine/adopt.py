"""Making a Hugging Face model attend through Ludus, and checking that nothing is lost on the way."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.engine.attention import NAME, LostContextError
from ludus.engine.backbone import (
    decoder_of,
    embedding_device,
    sampling_mode,
    text_config,
    unwrapped,
)
from ludus.engine.dense import Rule
from ludus.engine.forward import hidden_states, why_not_fused
from ludus.engine.fused import distrust
from ludus.engine.head import agree, probe_head, probe_tokens
from ludus.engine.packed import PackedContext

_PROBE_LENGTHS = (5, 3)

log = logging.getLogger(__name__)


def use_ludus_attention(model: nn.Module) -> None:
    """Switch `model` to the attention function of Ludus; refuse an architecture it does not fit.

    A short probe compares packed sequences with the architecture's own eager attention, sequence by
    sequence, and the head's logits with the model's. Calling it twice does no harm.
    """
    inner = unwrapped(model)
    decoder_of(model)
    _check_rotation(model)
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
            _tell(model)
        except BaseException:
            inner.set_attn_implementation(before)
            raise


def _tell(model: nn.Module) -> None:
    """On a GPU, the slower path is worth a word."""
    reason = why_not_fused(model)
    if reason is not None and embedding_device(model).type == "cuda":
        log.warning(
            "%s runs by its own forward pass, in more and slower kernels than the fused one: %s",
            type(unwrapped(model)).__name__,
            reason,
        )


class _Recorder(PackedContext):
    """Notes which window each layer asks for."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self.windows: dict[int, int | None] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        self.windows[layer] = rule.window
        return super().attend(layer, query, key, value, rule)


def _check_windows(model: nn.Module, windows: dict[int, int | None]) -> None:
    """Some architectures put the window into the mask alone, where a few probing tokens never meet it."""
    for layer, kind in enumerate(getattr(text_config(model), "layer_types", None) or ()):
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"layer {layer} has attention of the kind {kind!r}, which Ludus cannot run"
            )
        if (kind == "sliding_attention") != (windows.get(layer) is not None):
            raise ConfigError(
                f"layer {layer} of {type(unwrapped(model)).__name__} is of the kind {kind!r} and asks its "
                f"attention for the window {windows.get(layer)}: contexts longer than the window would be "
                "read wrongly"
            )


def _check_rotation(model: nn.Module) -> None:
    """Some rotary embeddings go by the longest sequence of a batch: neighbours would change a result."""
    given = getattr(text_config(model), "rope_parameters", None) or {}
    tables = [given, *(table for table in given.values() if isinstance(table, Mapping))]
    if any(table.get("rope_type") == "longrope" for table in tables):
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} has rotary embeddings of the kind 'longrope', which "
            "change with the longest sequence of a batch: results would depend on what is computed beside them"
        )


def _one_by_one(model: nn.Module) -> Tensor:
    pieces = torch.split(probe_tokens(model, sum(_PROBE_LENGTHS)), list(_PROBE_LENGTHS))
    decoder = decoder_of(model)
    return torch.cat([decoder(input_ids=p[None], use_cache=False).last_hidden_state[0] for p in pieces])


def _compare(model: nn.Module, expected: Tensor) -> None:
    name = type(unwrapped(model)).__name__
    tokens = probe_tokens(model, sum(_PROBE_LENGTHS))
    context = _Recorder(_PROBE_LENGTHS, tokens.device)
    try:
        given = hidden_states(model, tokens, context.position_ids, context)
    except LostContextError:
        raise _unheard(name) from None
    if why_not_fused(model) is None and not agree(given, expected):
        distrust(decoder_of(model), "it gave other hidden states than the module itself")
        given = hidden_states(model, tokens, context.position_ids, context)
    if context.calls == 0:
        raise _unheard(name)
    _check_windows(model, context.windows)
    if not bool(expected.isfinite().all()):
        raise ConfigError(
            f"{name} computes what is no finite number even on its own: its weights are damaged (look for NaN "
            "or infinity in them), or too large for their number format"
        )
    if not agree(given, expected):
        raise ConfigError(
            f"{name} gives other hidden states with packed sequences than with each one alone: "
            "something in it mixes tokens besides causal attention"
        )


def _unheard(name: str) -> ConfigError:
    return ConfigError(
        f"{name} does not hand keyword arguments down to its attention, which is how Ludus tells it what "
        "belongs together"
    )
