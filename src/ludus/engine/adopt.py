"""Making a Hugging Face model attend through Ludus, and checking that nothing is lost on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

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
from ludus.engine.forward import hidden_states, stock_hidden_states, why_not_fused
from ludus.engine.fused import distrust
from ludus.engine.head import probe_head
from ludus.engine.packed import PackedContext
from ludus.engine.probing import agree, agree_up_to_rounding, computed_in_float32, probe_tokens

_PROBE_LENGTHS = (5, 3, 8, 7)

log = logging.getLogger(__name__)


def use_ludus_attention(model: nn.Module) -> None:
    """Switch `model` to the attention function of Ludus; refuse an architecture it does not fit.

    A short probe compares packed sequences with the architecture's own eager attention, sequence by
    sequence, and the head's logits with the model's. The structure is compared in float32; results in half
    precision may differ by rounding (`probing`). Calling it twice does no harm.
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
            stock = _one_by_one(model)
            with computed_in_float32(model):
                exact = _one_by_one(model)
            inner.set_attn_implementation(NAME)
            if inner.config._attn_implementation != NAME:
                raise ConfigError(
                    f"{type(inner).__name__} does not use the attention interface of transformers, "
                    "which Ludus needs to run it"
                )
            _compare(model, stock, exact)
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


def _compare(model: nn.Module, stock: Tensor, exact: Tensor) -> None:
    """Refuse a model that mixes packed sequences; leave it to its own forward where the fused one is wrong."""
    name = type(unwrapped(model)).__name__
    if not bool(stock.isfinite().all()):
        raise ConfigError(
            f"{name} computes what is no finite number even on its own: its weights are damaged (look for NaN "
            "or infinity in them), or too large for their number format"
        )
    with computed_in_float32(model):
        packed = _packed(model, stock_hidden_states)
    if not agree(packed, exact):
        raise ConfigError(
            f"{name} gives other hidden states with packed sequences than with each one alone: "
            "something in it mixes tokens besides causal attention"
        )
    if why_not_fused(model) is None:
        if agree_up_to_rounding(_packed(model, hidden_states), stock, exact):
            return
        distrust(decoder_of(model), "it gave other hidden states than the module itself")
    if not agree_up_to_rounding(_packed(model, stock_hidden_states), stock, exact):
        raise ConfigError(
            f"{name} gives other hidden states with packed sequences than with each one alone in "
            f"{str(stock.dtype).removeprefix('torch.')}, though not in float32: this device's attention kernel "
            'for that format is wrong. Set model.dtype = "float32", and please report it'
        )


def _packed(model: nn.Module, forward: Callable[..., Tensor]) -> Tensor:
    """Hidden states of the probe's sequences, packed; refuses a model whose attention was not reached."""
    tokens = probe_tokens(model, sum(_PROBE_LENGTHS))
    context = _Recorder(_PROBE_LENGTHS, tokens.device)
    try:
        given = forward(model, tokens, context.position_ids, context)
    except LostContextError:
        raise _unheard(type(unwrapped(model)).__name__) from None
    if context.calls == 0:
        raise _unheard(type(unwrapped(model)).__name__)
    _check_windows(model, context.windows)
    return given


def _unheard(name: str) -> ConfigError:
    return ConfigError(
        f"{name} does not hand keyword arguments down to its attention, which is how Ludus tells it what "
        "belongs together"
    )
