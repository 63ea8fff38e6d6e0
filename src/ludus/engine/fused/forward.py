"""The forward pass itself: two norms, two joint products, attention and a gate a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ludus.engine.attention import AttentionContext
from ludus.engine.fused.blocks import fits, mlp_block, qkv_block
from ludus.engine.fused.blueprint import Blueprint, Layer, Norm
from ludus.engine.fused.projection import joint_linear
from ludus.kernels import add_rms_norm, rms_norm, rotate, silu_mul


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
