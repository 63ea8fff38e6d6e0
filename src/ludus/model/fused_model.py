"""The fused forward of Llama-like decoders, for engine and trainer: few kernels over the module's parameters.

It computes what the Hugging Face module computes. `decoder_parts` recognises a decoder and finds its parts; any
other model stays with its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ludus.kernels import add_rms_norm, rms_norm, rotate, silu_mul, unavailable
from ludus.model.attention import AttentionContext, AttentionParams, StackedAttentionContext
from ludus.model.fused_linear import (
    can_stack,
    parameter_grads,
    stacked_linear,
    stacked_matrix,
    stacked_parameters,
)
from ludus.model.hf_model import head_shape

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Model types (as a Hugging Face configuration names them) whose layers are computed alike."""


class RMSNorm(Protocol):
    """A root-mean-square norm as transformers writes it."""

    weight: Tensor
    variance_epsilon: float


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One decoder layer. Its projections are looked up at every pass: an adapter may have replaced them."""

    index: int
    before_attention: RMSNorm
    before_mlp: RMSNorm
    attention: Any
    mlp: Any
    params: AttentionParams

    @property
    def qkv(self) -> tuple[nn.Module, ...]:
        return self.attention.q_proj, self.attention.k_proj, self.attention.v_proj

    @property
    def gate_up(self) -> tuple[nn.Module, ...]:
        return self.mlp.gate_proj, self.mlp.up_proj

    @property
    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of query and key heads, where the architecture has them (Qwen3)."""
        norm = getattr(self.attention, "q_norm", None)
        return None if norm is None else (norm, self.attention.k_norm)


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The parts of a decoder."""

    embedding: nn.Module
    rotary: nn.Module
    layers: tuple[LayerParts, ...]
    final_norm: RMSNorm
    heads: int
    kv_heads: int


_recognised: WeakKeyDictionary[nn.Module, DecoderParts | str] = WeakKeyDictionary()


def decoder_parts(decoder: nn.Module) -> DecoderParts | None:
    """The parts of a supported decoder; None for any other."""
    found = _recognise(decoder)
    return None if isinstance(found, str) else found


def unsupported(decoder: nn.Module) -> str | None:
    """Why a decoder is not supported; None when it is."""
    found = _recognise(decoder)
    return found if isinstance(found, str) else None


def disable_fused(decoder: nn.Module, reason: str) -> None:
    """Use this decoder's own forward from now on."""
    _recognised[decoder] = reason


def _recognise(decoder: nn.Module) -> DecoderParts | str:
    if decoder not in _recognised:
        _recognised[decoder] = _examine(decoder)
    return _recognised[decoder]


def _examine(decoder: Any) -> DecoderParts | str:
    config = getattr(decoder, "config", None)
    kind = getattr(config, "model_type", None)
    if config is None or kind not in FAMILY:
        return f"layers of the kind {kind!r} are not computed by the fused forward"
    if getattr(config, "hidden_act", None) != "silu":
        return f"its activation is {config.hidden_act!r}, not silu"
    if getattr(config, "attention_dropout", 0.0):
        return "it has attention dropout"
    heads, kv_heads, size = head_shape(config)
    if (
        getattr(decoder.rotary_emb, "inv_freq", None) is None
        or len(decoder.rotary_emb.inv_freq) * 2 != size
    ):
        return "its rotary embedding covers a part of each head only"
    return DecoderParts(
        embedding=decoder.embed_tokens,
        rotary=decoder.rotary_emb,
        layers=tuple(_layer_parts(index, layer) for index, layer in enumerate(decoder.layers)),
        final_norm=decoder.norm,
        heads=heads,
        kv_heads=kv_heads,
    )


def _layer_parts(index: int, layer: Any) -> LayerParts:
    return LayerParts(
        index=index,
        before_attention=layer.input_layernorm,
        before_mlp=layer.post_attention_layernorm,
        attention=layer.self_attn,
        mlp=layer.mlp,
        params=AttentionParams(scaling=layer.self_attn.scaling, window=_window(layer.self_attn)),
    )


def _window(attention: Any) -> int | None:
    own = getattr(attention, "sliding_window", None)
    if own is None and attention.config.model_type == "mistral":
        own = getattr(attention.config, "sliding_window", None)
    return int(own) if own is not None else None


# The two halves of a layer around attention, each as one autograd function. Autograd would keep the output of
# every norm and gate for the product that follows. Here only their inputs are kept, and the kernels of the
# backward pass recompute the outputs. And a layer costs the host three calls in the backward pass instead of
# seven, which is what small models wait for.


def can_fuse(x: Tensor, stacked: Sequence[nn.Module], others: Sequence[nn.Module] = ()) -> bool:
    """Whether these layers are plain, gradients are wanted, and the kernels run here."""
    if not torch.is_grad_enabled() or unavailable(x.device) is not None:
        return False
    plain = all(type(layer) is nn.Linear and layer.bias is None for layer in others)
    return plain and can_stack(stacked)


def fused_qkv(
    added: Tensor | None,
    residual: Tensor,
    norm: tuple[Tensor, float],
    projections: Sequence[nn.Module],
    angles: tuple[Tensor, Tensor],
    heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query, key, value, residual): residual add, norm, projection, rotary."""
    parameters = stacked_parameters(projections)
    query, key, value, total = _Qkv.apply(
        added, residual, *norm, *angles, *heads, len(projections), *parameters
    )
    return query, key, value, residual if added is None else total


def fused_mlp(
    added: Tensor,
    residual: Tensor,
    norm: tuple[Tensor, float],
    gate_up: Sequence[nn.Module],
    down: nn.Module,
) -> tuple[Tensor, Tensor]:
    """(output, residual): residual add, norm, gate and up projection, SwiGLU, down projection."""
    parameters = stacked_parameters(gate_up)
    out, total = _Mlp.apply(added, residual, *norm, down.weight, len(gate_up), *parameters)
    return out, total


class _Qkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        added: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        count: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        from ludus.kernels import triton_layers

        ctx.set_materialize_grads(False)
        x, other = (residual, None) if added is None else (added, residual.contiguous())
        normed, total, rstd = triton_layers.rms_norm_forward(x.contiguous(), other, weight, eps)
        states = functional.linear(normed, *stacked_matrix(parameters, count))
        ctx.save_for_backward(total, rstd, weight, cos, sin, *parameters)
        ctx.count, ctx.is_first = count, added is None
        split = triton_layers.rotary_split(states, cos.contiguous(), sin.contiguous(), heads, kv_heads)
        return *split, None if added is None else total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from ludus.kernels import triton_layers

        total, rstd, weight, cos, sin, *parameters = ctx.saved_tensors
        dquery, dkey, dvalue, dtotal = grads
        assert dquery is not None and dkey is not None and dvalue is not None
        joint = triton_layers.rotary_join(
            dquery.contiguous(),
            dkey.contiguous(),
            dvalue.contiguous(),
            cos.contiguous(),
            sin.contiguous(),
        )
        matrix, _ = stacked_matrix(parameters, ctx.count)
        normed = torch.empty_like(total)
        dx, dweight = triton_layers.rms_norm_backward(
            joint @ matrix, _contiguous(dtotal), total, weight, rstd, normed
        )
        stacked = parameter_grads(joint, normed, parameters, ctx.count, ctx.needs_input_grad[9:])
        no_grads = [None] * 6  # eps, cos, sin, heads, kv_heads, count
        return None if ctx.is_first else dx, dx, dweight, *no_grads, *stacked


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        added: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        down: Tensor,
        count: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        from ludus.kernels import triton_layers

        ctx.set_materialize_grads(False)
        normed, total, rstd = triton_layers.rms_norm_forward(
            added.contiguous(), residual.contiguous(), weight, eps
        )
        both = functional.linear(normed, *stacked_matrix(parameters, count))
        ctx.save_for_backward(total, rstd, weight, both, down, *parameters)
        ctx.count = count
        return functional.linear(triton_layers.silu_mul_forward(both), down), total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from ludus.kernels import triton_layers

        total, rstd, weight, both, down, *parameters = ctx.saved_tensors
        dout, dtotal = grads
        assert dout is not None
        dout = dout.contiguous()
        product = both.new_empty(len(both), both.shape[1] // 2)
        dboth = triton_layers.silu_mul_backward(dout @ down, both, product)
        ddown = dout.t() @ product if ctx.needs_input_grad[4] else None
        del product
        matrix, _ = stacked_matrix(parameters, ctx.count)
        normed = torch.empty_like(total)
        dx, dweight = triton_layers.rms_norm_backward(
            dboth @ matrix, _contiguous(dtotal), total, weight, rstd, normed
        )
        stacked = parameter_grads(dboth, normed, parameters, ctx.count, ctx.needs_input_grad[6:])
        return dx, dx, dweight, None, ddown, None, *stacked


def _contiguous(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()


def fused_hidden_states(
    parts: DecoderParts,
    ids_T: Tensor,
    positions_T: Tensor,
    context: AttentionContext,
    checkpointed: int = 0,
    embedded_TD: Tensor | None = None,
) -> Tensor:
    """[T, hidden]: the last hidden states of flat tokens; `embedded_TD` stands in for their embeddings.

    The first `checkpointed` layers keep no activations: the backward pass recomputes them.
    """
    residual_TD: Tensor = parts.embedding(ids_T) if embedded_TD is None else embedded_TD
    cos, sin = parts.rotary(residual_TD[None], positions_T.reshape(1, -1))
    shared = (parts, cos[0], sin[0], context)
    added_TD: Tensor | None = None
    for number, layer in enumerate(parts.layers):
        if number < checkpointed and torch.is_grad_enabled():
            added_TD, residual_TD = checkpoint(
                _layer, layer, added_TD, residual_TD, *shared, use_reentrant=False
            )
        else:
            added_TD, residual_TD = _layer(layer, added_TD, residual_TD, *shared)
    normed_TD, _ = _norm(parts.final_norm, added_TD, residual_TD)
    return normed_TD


def _layer(
    layer: LayerParts,
    added_TD: Tensor | None,
    residual_TD: Tensor,
    parts: DecoderParts,
    cos_TD: Tensor,
    sin_TD: Tensor,
    context: AttentionContext,
) -> tuple[Tensor, Tensor]:
    """(output of the MLP, residual): the next norm adds them up."""
    heads = (parts.heads, parts.kv_heads)
    angles = (cos_TD, sin_TD)
    if layer.head_norms is None and can_fuse(residual_TD, layer.qkv):
        norm = (layer.before_attention.weight, layer.before_attention.variance_epsilon)
        query, key, value, residual_TD = fused_qkv(added_TD, residual_TD, norm, layer.qkv, angles, heads)
        mixed = _attend(layer, query, key, value, context)
    else:
        normed_TD, residual_TD = _norm(layer.before_attention, added_TD, residual_TD)
        qkv_TC = stacked_linear(layer.qkv, normed_TD)
        if layer.head_norms is not None:
            qkv_TC = _norm_heads(layer.head_norms, qkv_TC, *heads)
        if isinstance(context, StackedAttentionContext):
            mixed = context.attend_qkv(layer.index, qkv_TC, *angles, *heads, layer.params)
        else:
            mixed = _attend(layer, *rotate(qkv_TC, *angles, *heads), context)
    added_TD = stacked_linear([layer.attention.o_proj], mixed)
    if can_fuse(residual_TD, layer.gate_up, [layer.mlp.down_proj]):
        norm = (layer.before_mlp.weight, layer.before_mlp.variance_epsilon)
        return fused_mlp(added_TD, residual_TD, norm, layer.gate_up, layer.mlp.down_proj)
    normed_TD, residual_TD = _norm(layer.before_mlp, added_TD, residual_TD)
    opened_TI = silu_mul(stacked_linear(layer.gate_up, normed_TD))
    return stacked_linear([layer.mlp.down_proj], opened_TI), residual_TD


def _attend(
    layer: LayerParts, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
) -> Tensor:
    """[T, Hq D] from states [T, H, D].

    Only views lie between these and the kernel: selecting with an index would cost a copy in the backward pass.
    """
    query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
    mixed = context.attend(layer.index, query, key, value, layer.params)
    return mixed.squeeze(0).flatten(1)


def _norm(norm: RMSNorm, added: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    if added is None:
        return rms_norm(residual, norm.weight, norm.variance_epsilon), residual
    return add_rms_norm(added, residual, norm.weight, norm.variance_epsilon)


def _norm_heads(norms: tuple[RMSNorm, RMSNorm], qkv_TC: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Queries and keys normed head by head, as Qwen3 does before it rotates them."""
    size = qkv_TC.shape[1] // (heads + 2 * kv_heads)
    states_THD = qkv_TC.view(len(qkv_TC), -1, size)
    query, key, value = torch.split(states_THD, [heads, kv_heads, kv_heads], dim=1)
    query, key = (
        rms_norm(states, norm.weight, norm.variance_epsilon)
        for states, norm in zip((query, key), norms, strict=True)
    )
    return torch.cat([query, key, value], dim=1).flatten(1)
