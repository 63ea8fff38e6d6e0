"""Recognising a decoder of the Llama family and finding its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ludus.engine.attention import AttentionContext, Rule
from ludus.engine.fused_linear import can_join, joined_parameters, joint_linear, joint_parameters
from ludus.kernels import add_rms_norm, rms_norm, rotate, silu_mul, unavailable

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
        layers=tuple(_layer_parts(index, layer) for index, layer in enumerate(decoder.layers)),
        final_norm=decoder.norm,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
    )


def _layer_parts(index: int, layer: Any) -> Layer:
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


# --- blocks ---
# The two halves of a layer around attention, each as one step of the backward pass.
#
# Autograd would keep the output of every norm, and what a gate lets through, for the product that follows. Here
# only what goes into them is kept, and the kernels of their backward passes make their outputs once more. And a
# layer costs the host three calls in the backward pass instead of seven, which is what small models wait for.


def fits(x: Tensor, joined: Sequence[nn.Module], others: Sequence[nn.Module] = ()) -> bool:
    """Whether these layers are plain enough, and gradients are wanted where the kernels run."""
    if not torch.is_grad_enabled() or unavailable(x.device) is not None:
        return False
    plain = all(type(layer) is nn.Linear and layer.bias is None for layer in others)
    return plain and can_join(joined)


def qkv_block(
    added: Tensor | None,
    residual: Tensor,
    norm: tuple[Tensor, float],
    projections: Sequence[nn.Module],
    angles: tuple[Tensor, Tensor],
    heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query, key, value, residual): add, norm, project, rotate."""
    parameters = joined_parameters(projections)
    query, key, value, total = _Qkv.apply(
        added, residual, *norm, *angles, *heads, len(projections), *parameters
    )
    return query, key, value, residual if added is None else total


def mlp_block(
    added: Tensor,
    residual: Tensor,
    norm: tuple[Tensor, float],
    gate_up: Sequence[nn.Module],
    down: nn.Module,
) -> tuple[Tensor, Tensor]:
    """(what the block adds, residual): add, norm, open the gate, project."""
    parameters = joined_parameters(gate_up)
    out, total = _Mlp.apply(added, residual, *norm, down.weight, len(gate_up), *parameters)
    return out, total


def _slopes(
    grad: Tensor, x: Tensor, parameters: Sequence[Tensor], count: int, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of joined weights and biases, given those of their output."""
    widths = [len(parameter) for parameter in parameters[:count]]
    found: list[Tensor | None] = [None] * len(parameters)
    if any(needed[:count]):
        found[:count] = torch.split(grad.t() @ x, widths)
    if any(needed[count:]):
        found[count:] = torch.split(grad.sum(0), widths)
    return [slope if is_needed else None for slope, is_needed in zip(found, needed, strict=True)]


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
        if added is None:
            normed, total, rstd = triton_layers.rms_norm_forward(
                residual.contiguous(), None, weight, eps
            )
        else:
            normed, total, rstd = triton_layers.rms_norm_forward(
                added.contiguous(), residual.contiguous(), weight, eps
            )
        states = functional.linear(normed, *joint_parameters(parameters, count))
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
        matrix, _ = joint_parameters(parameters, ctx.count)
        normed = torch.empty_like(total)
        dx, dweight = triton_layers.rms_norm_backward(
            joint @ matrix, _whole(dtotal), total, weight, rstd, normed
        )
        slopes = _slopes(joint, normed, parameters, ctx.count, ctx.needs_input_grad[9:])
        return None if ctx.is_first else dx, dx, dweight, None, None, None, None, None, None, *slopes


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
        both = functional.linear(normed, *joint_parameters(parameters, count))
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
        matrix, _ = joint_parameters(parameters, ctx.count)
        normed = torch.empty_like(total)
        dx, dweight = triton_layers.rms_norm_backward(
            dboth @ matrix, _whole(dtotal), total, weight, rstd, normed
        )
        slopes = _slopes(dboth, normed, parameters, ctx.count, ctx.needs_input_grad[6:])
        return dx, dx, dweight, None, ddown, None, *slopes


def _whole(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()


# --- forward ---
# The forward pass itself: two norms, two joint products, attention and a gate a layer.


def fused_hidden_states(
    blueprint: Blueprint,
    ids_T: Tensor,
    positions_T: Tensor,
    context: AttentionContext,
    recomputed: int = 0,
) -> Tensor:
    """[T, hidden]: the last hidden states of flat tokens.

    The first `recomputed` layers keep nothing for the backward pass and are computed again in it.
    """
    residual_TD: Tensor = blueprint.embedding(ids_T)
    cos, sin = blueprint.rotary(residual_TD[None], positions_T.reshape(1, -1))
    shared = (blueprint, cos[0], sin[0], context)
    added_TD: Tensor | None = None
    for number, layer in enumerate(blueprint.layers):
        if number < recomputed and torch.is_grad_enabled():
            added_TD, residual_TD = checkpoint(
                _layer, layer, added_TD, residual_TD, *shared, use_reentrant=False
            )
        else:
            added_TD, residual_TD = _layer(layer, added_TD, residual_TD, *shared)
    normed_TD, _ = _normed(blueprint.final_norm, added_TD, residual_TD)
    return normed_TD


def _layer(
    layer: Layer,
    added_TD: Tensor | None,
    residual_TD: Tensor,
    blueprint: Blueprint,
    cos_TD: Tensor,
    sin_TD: Tensor,
    context: Any,
) -> tuple[Tensor, Tensor]:
    """(what the layer's last block adds, what it is to be added to): the next norm adds them up."""
    heads = (blueprint.heads, blueprint.kv_heads)
    angles = (cos_TD, sin_TD)
    if layer.head_norms is None and fits(residual_TD, layer.qkv):
        norm = (layer.before_attention.weight, layer.before_attention.variance_epsilon)
        query, key, value, residual_TD = qkv_block(added_TD, residual_TD, norm, layer.qkv, angles, heads)
        mixed = _attended(layer, query, key, value, context)
    else:
        normed_TD, residual_TD = _normed(layer.before_attention, added_TD, residual_TD)
        qkv_TC = joint_linear(layer.qkv, normed_TD)
        if layer.head_norms is not None:
            qkv_TC = _with_normed_heads(layer.head_norms, qkv_TC, *heads)
        if hasattr(context, "attend_joint"):
            mixed = context.attend_joint(layer.index, qkv_TC, *angles, *heads, layer.rule)
        else:
            mixed = _attended(layer, *rotate(qkv_TC, *angles, *heads), context)
    added_TD = joint_linear([layer.attention.o_proj], mixed)
    if fits(residual_TD, layer.gate_up, [layer.mlp.down_proj]):
        norm = (layer.before_mlp.weight, layer.before_mlp.variance_epsilon)
        return mlp_block(added_TD, residual_TD, norm, layer.gate_up, layer.mlp.down_proj)
    normed_TD, residual_TD = _normed(layer.before_mlp, added_TD, residual_TD)
    opened_TI = silu_mul(joint_linear(layer.gate_up, normed_TD))
    return joint_linear([layer.mlp.down_proj], opened_TI), residual_TD


def _attended(layer: Layer, query: Tensor, key: Tensor, value: Tensor, context: Any) -> Tensor:
    """[T, Hq D] from states [T, H, D].

    Only views lie between these and the kernel: selecting with an index would cost a copy in the backward pass.
    """
    flat = [states.transpose(0, 1).unsqueeze(0) for states in (query, key, value)]
    mixed: Tensor = context.attend(layer.index, *flat, layer.rule)
    return mixed.squeeze(0).flatten(1)


def _normed(norm: Norm, added: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    if added is None:
        return rms_norm(residual, norm.weight, norm.variance_epsilon), residual
    return add_rms_norm(added, residual, norm.weight, norm.variance_epsilon)


def _with_normed_heads(norms: tuple[Norm, Norm], qkv_TC: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Queries and keys normed head by head, as Qwen3 does before it rotates them."""
    size = qkv_TC.shape[1] // (heads + 2 * kv_heads)
    states_THD = qkv_TC.view(len(qkv_TC), -1, size)
    query, key, value = torch.split(states_THD, [heads, kv_heads, kv_heads], dim=1)
    query, key = (
        rms_norm(states, norm.weight, norm.variance_epsilon)
        for states, norm in zip((query, key), norms, strict=True)
    )
    return torch.cat([query, key, value], dim=1).flatten(1)
