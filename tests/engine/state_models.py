"""Tiny random models with layers that keep a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from engine_models import VOCABULARY
from transformers import PreTrainedModel

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
}
_PURE = {name: _SHAPE[name] for name in ("vocab_size", "hidden_size", "pad_token_id", "eos_token_id")}
_MAMBA1 = {**_PURE, "num_hidden_layers": 3, "state_size": 8, "conv_kernel": 4, "expand": 2}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_THREE_TO_ONE = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_DELTA = {
    **_SHAPE,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": _THREE_TO_ONE,
}
_CONV = {
    **_SHAPE,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
}
_MAMBA2 = {
    **_SHAPE,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_LATENT = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "layer_types": _THREE_TO_ONE,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "lfm2": ("Lfm2Config", _CONV),
    "bamba": ("BambaConfig", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "mamba2": (
        "Mamba2Config",
        {**_MAMBA1, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            **_SHAPE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_EXPERTS}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_DELTA, **_EXPERTS}),
    "olmo_hybrid": ("OlmoHybridConfig", {**_DELTA, "linear_num_key_heads": 4}),
    "lfm2_moe": ("Lfm2MoeConfig", {**_CONV, **_EXPERTS, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", _CONV),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "falcon_h1": ("FalconH1Config", {**_MAMBA2, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_SHAPE,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **_SHAPE,
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            **_LATENT,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
        },
    ),
    "mamba": ("MambaConfig", _MAMBA1),
    "falcon_mamba": ("FalconMambaConfig", _MAMBA1),
}
# one of each mechanism: gated delta rule, short convolution, Mamba2 with and without attention, KDA, Mamba
FIRST = ("qwen3_5", "lfm2", "bamba", "mamba2", "kimi_linear", "jamba")
EVERY = [
    pytest.param(name, marks=() if name in FIRST else pytest.mark.slow, id=name) for name in FAMILIES
]


def make_stateful(family: str = "qwen3_5", **changes: Any) -> PreTrainedModel:
    """A model with large enough random weights that its choices depend on its context."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, name, None)
    if config is None:
        pytest.skip(f"this transformers has no {name}")
    kind = getattr(transformers, name.replace("TextConfig", "Config").replace("Config", "ForCausalLM"))
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config(**{**settings, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(2)
    return model
