"""Patching a Hugging Face model to attend through Ludus, and the probes that check the result.

A probe compares two ways to compute a model's hidden states. Trained weights have massive activations, which
amplify rounding: in bfloat16, stock eager and stock SDPA attention can differ by half a token's norm, so no
fixed tolerance tells a wrong result from rounding. So the structure is compared in float32, and what runs in
half precision must come as close to the float32 result as the stock module in the same format does.
`use_ludus_attention` probes attention over packed sequences, `probe_head` the logits, `check_images` whether
images can be run: features in the place of placeholders and in deeper layers, positions, and what an image's
tokens see (`image_layout.py`). Models that do something else with images come out differently, and are refused.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.core.messages import Media, MediaSpan
from ludus.model.attention import AttentionParams
from ludus.model.forward import (
    INSTEAD,
    NAME,
    SparseAttentionError,
    head_logits,
    hidden_states,
    stock_hidden_states,
    why_not_fused,
)
from ludus.model.fused_model import disable_fused
from ludus.model.hf_model import (
    computed_in_float32,
    decoder_of,
    device_of,
    rows_alone,
    run_rows_alone,
    sampling_mode,
    text_config,
    unwrapped,
    vocabulary_size,
)
from ludus.model.image_files import decode_image, noise_image
from ludus.model.image_layout import both_ways, has_rope_index
from ludus.model.images import (
    ImageProcessor,
    images_of,
    placed_features,
    row_hidden_states,
    with_features,
)
from ludus.model.packed_attention import PackedContext
from ludus.model.state_layers import StateCall, adopt_state_layers, check_states

_EXACT = 1e-4
_ROUNDED = 0.05
# How much larger than the stock module's rounding error another kernel's may be.
_SLACK = 2.0


def probe_tokens(model: nn.Module, count: int) -> Tensor:
    """A few arbitrary tokens of the model's vocabulary, on its device."""
    return (torch.arange(count, device=device_of(model)) * 7 + 3) % vocabulary_size(model)


def agree(given: Tensor, expected: Tensor) -> bool:
    """Whether two results of the same arithmetic are equal, as far as their precision allows."""
    if given.shape != expected.shape:
        return False
    tolerance = _EXACT if expected.dtype == torch.float32 else _ROUNDED
    scale = max(1.0, float(expected.float().abs().max()))
    return float((given.float() - expected.float()).abs().max()) <= tolerance * scale


def agree_up_to_rounding(given_TD: Tensor, stock_TD: Tensor, exact_TD: Tensor) -> bool:
    """Whether `given` is about as close to the float32 result as the stock module in the same format.

    The error is relative to each token's norm and averaged over tokens: rounding throws single tokens far off.
    """
    if given_TD.shape != exact_TD.shape:
        return False
    if given_TD.dtype == torch.float32:
        return agree(given_TD, exact_TD)
    allowed = _ROUNDED + _SLACK * _relative_error(stock_TD, exact_TD)
    return _relative_error(given_TD, exact_TD) <= allowed


def _relative_error(given_TD: Tensor, exact_TD: Tensor) -> float:
    exact = exact_TD.float()
    distance_T = (given_TD.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-6)
    return float(distance_T.mean())


_PROBED_LAYERS = 2
_PROBE_LENGTHS = (5, 3, 8, 7)

log = logging.getLogger(__name__)


def use_ludus_attention(model: nn.Module, *, or_alone: bool = True) -> None:
    """Switch `model` to the attention function of Ludus, or run each row alone where it does not fit.

    A causal model that Ludus' attention does not fit is then run by its own forward alone, row by row and
    without a KV cache, with a warning: exact, and slow. It is refused if it is not causal, if its head does
    something unknown, or if it may not run `or_alone`.
    """
    decoder_of(model)
    _check_rotation(model)
    if rows_alone(model) is not None:
        return
    try:
        _switch(model)
    except ConfigError as error:
        if not or_alone or isinstance(error, SparseAttentionError) or not _is_causal_alone(model):
            raise
        run_rows_alone(model, str(error))
        log.warning(
            "%s is run row by row and without a KV cache, every context anew for each token: for small models "
            "and short contexts only (%s)",
            type(unwrapped(model)).__name__,
            error,
        )


def _is_causal_alone(model: nn.Module) -> bool:
    """Whether each token depends on those before it alone, and the head is one that Ludus computes."""
    tokens = probe_tokens(model, sum(_PROBE_LENGTHS))
    decoder = decoder_of(model)
    try:
        with torch.no_grad(), sampling_mode(model), computed_in_float32(model):
            parts = [tokens[:length] for length in range(1, len(tokens) + 1)]
            states = [decoder(input_ids=p[None], use_cache=False).last_hidden_state[0] for p in parts]
        probe_head(model)
    except (ConfigError, RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return False
    last = torch.cat([one[-1:] for one in states])
    return bool(last.isfinite().all()) and agree(last, states[-1])


def _switch(model: nn.Module) -> None:
    """Switch `model` to the attention function of Ludus; refuse an architecture it does not fit.

    A short probe compares packed sequences with the architecture's own eager attention, sequence by
    sequence, and the head's logits with the model's. The structure is compared in float32; results in half
    precision may differ by rounding. Calling it twice does no harm.
    """
    inner = unwrapped(model)
    _check_sparse(model)
    adopt_state_layers(model)
    config = text_config(model)
    if config._attn_implementation == NAME:
        return
    # a vision tower keeps its own attention, which is not causal
    switched = inner if config is inner.config else decoder_of(model)
    before = config._attn_implementation
    with torch.no_grad(), sampling_mode(model):
        try:
            switched.set_attn_implementation("eager")
            with _fails_as_config(model, "in its own forward pass, without Ludus"):
                stock = _one_by_one(model)
            with computed_in_float32(model):
                exact = _one_by_one(model)
            switched.set_attn_implementation(NAME)
            if config._attn_implementation != NAME:
                raise ConfigError(
                    f"{type(inner).__name__} does not use the attention interface of transformers, "
                    "which Ludus needs to run it"
                )
            with _fails_as_config(model, "when it runs packed sequences by the attention of Ludus"):
                _check_packed(model, stock, exact)
            probe_head(model)
            _warn_if_slow(model)
        except BaseException:
            switched.set_attn_implementation(before)
            raise


def switch_attention(model: nn.Module) -> None:
    """Switch a model without weights to the attention function of Ludus, which fits its architecture."""
    config = text_config(model)
    switched = unwrapped(model) if config is unwrapped(model).config else decoder_of(model)
    switched.set_attn_implementation(NAME)
    adopt_state_layers(model)


def probe_architecture(model: nn.Module) -> None:
    """Refuse an architecture that the attention function of Ludus does not fit, of a model without weights.

    A model of two such layers and one of each other kind, with random weights, is probed in its place, on the
    host.
    """
    inner = unwrapped(model)
    shallow = copy.deepcopy(inner.config)
    config = shallow.get_text_config()
    layers = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or [""] * layers)
    chosen = [i for i, kind in enumerate(kinds) if i < _PROBED_LAYERS or kind not in kinds[:i]]
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:  # one entry for each layer
            setattr(config, name, [value[i] for i in chosen])
    config.num_hidden_layers = len(chosen)
    if getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers = 0  # the layers that share are the last ones
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = type(inner)._from_config(shallow, dtype=inner.dtype).eval()
        use_ludus_attention(made, or_alone=False)


def _warn_if_slow(model: nn.Module) -> None:
    """Warn on a GPU that the fused forward does not apply."""
    reason = why_not_fused(model)
    if reason is not None and device_of(model).type == "cuda":
        log.warning(
            "%s runs by its own forward pass, in more and slower kernels than the fused one: %s",
            type(unwrapped(model)).__name__,
            reason,
        )


class _Recorder(PackedContext):
    """Records how each layer asks to attend, and tries the states of those that keep one."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self.params: dict[int, AttentionParams] = {}
        self.stateful: set[int] = set()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        self.params[layer] = params
        return super().attend(layer, query, key, value, params)

    def run_state_layer(self, call: StateCall) -> Tensor:
        result = super().run_state_layer(call)
        self.stateful.add(call.layer)
        if result.dtype == torch.float32:
            last = torch.arange(self.tokens - self.lengths[-1], self.tokens, device=self.device)
            check_states(call, last, result[0, last], agree)
        return result


_REACHES: dict[str, Callable[[AttentionParams], bool]] = {
    "full_attention": lambda params: params.reach == (None, None),
    "sliding_attention": lambda params: params.window is not None,
    "chunked_attention": lambda params: params.chunk is not None,
}


def _check_windows(model: nn.Module, found: dict[int, AttentionParams], stateful: set[int]) -> None:
    """Some architectures put the window into the mask alone, where a few probe tokens never meet it."""
    for layer, kind in enumerate(getattr(text_config(model), "layer_types", None) or ()):
        if kind not in _REACHES and stateful:
            if layer not in found:  # a state alone, or no other tokens at all
                continue
            if layer in stateful:  # both, side by side
                kind = "sliding_attention" if "sliding" in kind else "full_attention"
        if kind not in _REACHES:
            raise ConfigError(
                f"layer {layer} has attention of the kind {kind!r}, which Ludus cannot run. {INSTEAD}"
            )
        asked = found[layer].reach if layer in found else None
        if layer not in found or not _REACHES[kind](found[layer]):
            raise ConfigError(
                f"layer {layer} of {type(unwrapped(model)).__name__} is of the kind {kind!r} and asks its "
                f"attention for the (window, chunk) {asked}: contexts longer than the window would be "
                "read wrongly"
            )


def _check_sparse(model: nn.Module) -> None:
    """Refuse layers that choose the tokens that they see, by keys of their own that no KV cache here keeps."""
    for name, module in decoder_of(model).named_modules():
        if isinstance(getattr(module, "indexer", None), nn.Module):
            raise SparseAttentionError(
                f"{name} ({type(module).__name__}) chooses by an indexer what its tokens see (sparse "
                f"attention), which Ludus cannot run. {INSTEAD}"
            )


@contextmanager
def _fails_as_config(model: nn.Module, where: str) -> Iterator[None]:
    """Say in words that an architecture cannot run, or that its configuration does not fit together."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError, IndexError, KeyError, AssertionError) as error:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} fails {where}: {type(error).__name__}: {error}"
        ) from error


def _check_rotation(model: nn.Module) -> None:
    """Refuse rotary embeddings that depend on the longest sequence of a batch."""
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


def _check_packed(model: nn.Module, stock: Tensor, exact: Tensor) -> None:
    """Refuse a model that mixes packed sequences; disable the fused forward where it is wrong."""
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
        disable_fused(decoder_of(model), "it gave other hidden states than the module itself")
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
    given = forward(model, tokens, context.position_ids, context)
    if context.calls == context.state_calls == 0:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} does not attend through the attention interface of "
            "transformers, which is how Ludus tells it what belongs together"
        )
    _check_windows(model, context.params, context.stateful)
    return given


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


FAMILIES = (
    "LLaVA, LLaVA-NeXT, LLaVA-OneVision, Idefics3, SmolVLM, InternVL, Mistral 3, Qwen2-VL, Qwen2.5-VL, "
    "Qwen3-VL, Qwen3.5, GLM-4V, Gemma 3, Gemma 4"
)
_INSTEAD = f'use a model such as {FAMILIES}, or set model.vision = "off" to train it on text alone'


def check_positions(model: nn.Module) -> None:
    """Refuse a model that says itself that its images have positions of a kind that Ludus does not run."""
    rotation = getattr(text_config(model), "rope_parameters", None) or {}
    if "mrope_section" in rotation and not has_rope_index(model):
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} gives the tokens of an image positions in two or three "
            f"dimensions (M-RoPE), and has no get_rope_index that computes them: {_INSTEAD}"
        )


def check_images(model: nn.Module) -> None:
    """Refuse a model whose own forward sees images otherwise. Its attention must be its own."""
    inner, processor = unwrapped(model), images_of(model)
    assert processor is not None
    name = type(inner).__name__
    probes = [noise_image(0), noise_image(1, (80, 56))]
    text = f"{processor.text} and {processor.text} are"
    images = [decode_image(probe.data or b"") for probe in probes]
    made = dict(processor.inner(text=text, images=images, add_special_tokens=False, return_tensors="pt"))
    spans = _spans(processor, made["input_ids"][0].tolist(), probes)
    if spans is None:
        raise ConfigError(
            f"the processor of {name} writes an image in other tokens beside another one than alone: "
            f"{_INSTEAD}"
        )
    with torch.no_grad(), sampling_mode(model):
        expected = inner(**_placed(made, model), use_cache=False).logits[0]
        given = _ours(model, made["input_ids"][0].to(device_of(model)), spans)
    if not agree(given, expected):
        raise ConfigError(
            f"{name} does something else with images than Ludus does, which reads their features in the place "
            "of placeholder tokens (other positions, other attention between their tokens, or features in "
            f"other layers): {_INSTEAD}"
        )


def _ours(model: nn.Module, ids_T: Tensor, spans: list[MediaSpan]) -> Tensor:
    """The logits as Ludus computes them; by the model's own attention where that is causal."""
    if both_ways(model) is not None:
        with _attention_switched(model):
            return head_logits(model, row_hidden_states(model, ids_T, spans))
    placed = placed_features(model, spans)
    assert placed is not None
    inputs, spatial = with_features(model, ids_T, placed), placed.positions([len(ids_T)])
    assert inputs is not None
    counted = torch.arange(len(ids_T), device=ids_T.device)[None]
    positions = counted if spatial is None else torch.from_numpy(spatial).to(ids_T.device)[:, None]
    read = {"inputs_embeds": inputs.embedded_TH[None], "position_ids": positions, **inputs.others}
    return head_logits(model, decoder_of(model)(**read, use_cache=False).last_hidden_state[0])


@contextmanager
def _attention_switched(model: nn.Module) -> Iterator[None]:
    """The decoder attends through Ludus, for a while."""
    decoder = decoder_of(model)
    before = decoder.config._attn_implementation
    try:
        decoder.set_attn_implementation(NAME)
        yield
    finally:
        decoder.set_attn_implementation(before)


def _placed(made: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    dtype, device = unwrapped(model).get_input_embeddings().weight.dtype, device_of(model)
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in made.items()
    }


def _spans(processor: ImageProcessor, tokens: list[int], images: list[Media]) -> list[MediaSpan] | None:
    """Where each image's tokens stand; None if they are not there."""
    spans: list[MediaSpan] = []
    start = 0
    for image in images:
        own = processor.tokens(image)
        found = next((i for i in range(start, len(tokens)) if tokens[i : i + len(own)] == own), None)
        if found is None:
            return None
        start = found + len(own)
        spans.append(MediaSpan(image.sha256, found, start, image.data))
    return spans
