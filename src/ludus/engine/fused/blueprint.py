"""Recognising a decoder of the Llama family and finding its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ludus.engine.dense import Rule

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Model types (as a Hugging Face configuration names them) whose layers are computed alike."""


class Norm(Protocol):
    """A root-mean-square norm as transformers writes it."""

    weight: Tensor
    variance_epsilon: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Its projections are looked up at every pass: an adapter may have replaced them."""

    index: int
    before_attention: Norm
    before_mlp: Norm
    attention: Any
    mlp: Any
    rule: Rule

    @property
    def qkv(self) -> tuple[nn.Module, ...]:
        return self.attention.q_proj, self.attention.k_proj, self.attention.v_proj

    @property
    def gate_up(self) -> tuple[nn.Module, ...]:
        return self.mlp.gate_proj, self.mlp.up_proj

    @property
    def head_norms(self) -> tuple[Norm, Norm] | None:
        """What queries and keys are normed by, head by head, where the architecture does that."""
        norm = getattr(self.attention, "q_norm", None)
        return None if norm is None else (norm, self.attention.k_norm)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The parts of a decoder."""

    embedding: nn.Module
    rotary: nn.Module
    layers: tuple[Layer, ...]
    final_norm: Norm
    heads: int
    kv_heads: int


_known: WeakKeyDictionary[nn.Module, Blueprint | str] = WeakKeyDictionary()


def blueprint_of(decoder: nn.Module) -> Blueprint | None:
    """The parts of a decoder of the family; None for any other."""
    found = _look(decoder)
    return None if isinstance(found, str) else found


def unrecognised(decoder: nn.Module) -> str | None:
    """Why a decoder is not of the family; None when it is."""
    found = _look(decoder)
    return found if isinstance(found, str) else None


def distrust(decoder: nn.Module, reason: str) -> None:
    """Leave this decoder to its own forward from now on."""
    _known[decoder] = reason


def _look(decoder: nn.Module) -> Blueprint | str:
    if decoder not in _known:
        _known[decoder] = _examine(decoder)
    return _known[decoder]


def _examine(decoder: Any) -> Blueprint | str:
    config = getattr(decoder, "config", None)
    kind = getattr(config, "model_type", None)
    if config is None or kind not in FAMILY:
        return f"layers of the kind {kind!r} are not computed by the fused forward"
    if getattr(config, "hidden_act", None) != "silu":
        return f"its activation is {config.hidden_act!r}, not silu"
    if getattr(config, "attention_dropout", 0.0):
        return "it drops attention weights out"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (
        getattr(decoder.rotary_emb, "inv_freq", None) is None
        or len(decoder.rotary_emb.inv_freq) * 2 != size
    ):
        return "it rotates a part of each head only"
    return Blueprint(
        embedding=decoder.embed_tokens,
        rotary=decoder.rotary_emb,
        layers=tuple(_layer(index, layer) for index, layer in enumerate(decoder.layers)),
        final_norm=decoder.norm,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
    )


def _layer(index: int, layer: Any) -> Layer:
    return Layer(
        index=index,
        before_attention=layer.input_layernorm,
        before_mlp=layer.post_attention_layernorm,
        attention=layer.self_attn,
        mlp=layer.mlp,
        rule=Rule(scaling=layer.self_attn.scaling, window=_window(layer.self_attn)),
    )


def _window(attention: Any) -> int | None:
    own = getattr(attention, "sliding_window", None)
    if own is None and attention.config.model_type == "mistral":
        own = getattr(attention.config, "sliding_window", None)
    return int(own) if own is not None else None
