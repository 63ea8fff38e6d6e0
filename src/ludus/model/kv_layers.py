"""What each layer of a model keeps: keys and values of a token (heads and sizes, or none), or a state.

It is found by running one token, without knowledge of architectures: heads may differ by layer (Gemma 4), keys
and values may have different sizes (latent attention), and a layer may attend to the keys and values of an
earlier one (Gemma 3n, Gemma 4), which it is then given as the very same tensors.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ludus.model.attention import AttentionParams
from ludus.model.forward import hidden_states
from ludus.model.hf_model import rows_alone, sampling_mode
from ludus.model.probes import probe_tokens
from ludus.model.state_layers import LayerStates, StateCall, StateShapes, state_layers

Place = tuple[int, int]
"""A layer, and how often it has attended before in this forward pass (some architectures run layers again)."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What a layer keeps of each token."""

    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    params: AttentionParams

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_size + self.value_size) * self.dtype.itemsize


class KVPlaces:
    """Where the keys and values of each layer's attention belong, in the order of one forward pass."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self._handed: list[tuple[Any, Any, Place]] = []

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Place, bool]:
        """(place, whether it has these keys and values already, of an earlier layer)."""
        for known_key, known_value, place in self._handed:
            if known_key() is key and known_value() is value:
                return place, True
        calls = self._calls.get(layer, 0)
        self._calls[layer] = calls + 1
        self._handed.append((weakref.ref(key), weakref.ref(value), (layer, calls)))
        return (layer, calls), False


class _Recorder:
    """A context for one token that records what each layer keeps; attention returns zeros."""

    def __init__(self) -> None:
        self.places = KVPlaces()
        self.found: dict[Place, LayerKV] = {}
        self.shared = 0
        self.states: StateShapes = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        place, is_shared = self.places.of(layer, key, value)
        if is_shared:
            self.shared += 1
        else:
            sizes = (key.shape[1], key.shape[3], value.shape[3])
            self.found[place] = LayerKV(*sizes, key.dtype, params)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def run_state_layer(self, call: StateCall) -> Tensor:
        states = LayerStates()
        result = call.run(None, 1, 1, states)
        kept = states.tensors.items()
        self.states[call.module] = {key: (tensor.shape[1:], tensor.dtype) for key, tensor in kept}
        return result[None]


def kv_layers(model: nn.Module) -> tuple[dict[Place, LayerKV], int]:
    """What is kept by place, and how many layers share another's."""
    recorder = _recorded(model)
    return recorder.found, recorder.shared


def state_shapes(model: nn.Module) -> StateShapes:
    """The states that a model's layers keep of a sequence; none for most models."""
    return _recorded(model).states if state_layers(model) else {}


def _recorded(model: nn.Module) -> _Recorder:
    recorder = _Recorder()
    if rows_alone(model) is not None:
        return recorder
    tokens = probe_tokens(model, 1)
    with torch.no_grad(), sampling_mode(model):
        hidden_states(model, tokens, torch.zeros_like(tokens), recorder)
    return recorder
