"""An architecture in small: the configuration of a few narrow layers that have every kind of layer it has.

What fits an architecture shows with tiny random weights as well as with real ones: `ludus check model` probes
one that it makes from a config.json, and `benchmarks/families.py` compares every family of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

VOCABULARY = 160
WINDOW = 6
"""Tokens of a sliding window or a chunk, so that a few tokens meet it."""
HEADS, HEAD = 4, 16
_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth"),
    *("num_blocks", "num_layers_per_stack"),
)
_AT_MOST: tuple[tuple[str, int], ...] = (
    (r"vocab_size|unpadded_vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (r"hidden_size|n_embd|d_model|emb_dim|embedding_dim|lru_width|attention_hidden_size", HEADS * HEAD),
    (r"embed_dim|embedding_size|word_embed_proj_dim|out_hidden_size", HEADS * HEAD),
    (r"num_attention_heads|n_head|n_heads|num_heads|attention_heads|decoder_attention_heads", HEADS),
    (r"swa_num_attention_heads|linear_num_heads|linear_num_value_heads|num_query_groups", HEADS),
    (r"index_n_heads|linear_num_key_heads|o_groups", 2),
    (r"(global_)?head_dim|d_head|swa_head_dim|kv_channels|attention_head_dim", HEAD),
    (r"v_head_dim|qk_nope_head_dim|index(er)?_head_dim|linear_(key|value_)?head_dim|d_rel", HEAD),
    (r"linear_(key|value)_head_dim|mamba_d_head|mamba_head_dim|mamba_headdim", HEAD),
    (r"qk_rope_head_dim|rotary_dim", HEAD // 2),
    (r"\w*intermediate_size(_mlp)?|n_inner|ffn_dim|ffn_hidden_size|decoder_ffn_dim", 48),
    (r"expert_ffn_hidden_size|dff|d_inner|router_hidden_size|hidden_size_per_layer_input", 32),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|n_group|num_expert_group", 2),
    (r"topk_group|moe_num_shared_experts|num_shared_experts|n_shared_experts", 1),
    (r"\w*lora_rank|\w*lowrank|adapter_rank|gated_norm_rank|laurel_rank", 8),
    (r"mamba_d_state|state_size|ssm_state_size", HEAD),
    (r"mamba_chunk_size|chunk_size|block_size|index_block_size", 8),
    (r"index_topk|index_topk_blocks|indexer_budget", 4),
    (r"sliding_window(_size)?|attention_chunk_size|window_size|attention_window_size", WINDOW),
    (r"local_attention|keep_window_size|floor_scale|log_scaling_n_floor|rel_extent", WINDOW),
    (r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index", 1),
    (r"ngram_vocab_size_base|\w*hash\w*vocab", 64),
    (r"ple_embed_dim", 64),
    (r"split_ngram_parts", 2),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length", 512),
    (r"original_max_position_embeddings", 64),
    (r"query_pre_attn_scalar", HEAD),
)
_OWN: dict[str, dict[str, Any]] = {
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"expert_layer_period": 3, "expert_layer_offset": 2, "mamba_dt_rank": 4},
    "bamba": {"mamba_n_heads": 8},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": HEAD, "mamba_d_ssm": 8 * HEAD},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "time_step_rank": 4},
    "mamba": {"time_step_rank": 4},
    "falcon_mamba": {"time_step_rank": 4},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "dots3_note_text": {"head_dim": 32},
    "reformer": {"axial_pos_embds": False},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 6, "attention_hidden_size": 128, "attention_head_dim": 32}
    | {"mamba_dt_rank": 4, "use_mamba_kernels": False}
    | {"layers_block_type": [*["linear_attention"] * 2, "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 6, "attention_hidden_size": 128, "attention_head_dim": 32}
    | {"mamba_headdim": 16, "n_mamba_heads": 8, "hybrid_layer_ids": [2, 5]}
    | {"layers_block_type": [*["linear_attention"] * 2, "hybrid"] * 2},
}
"""Sizes that follow from others in a way of a family's own."""


def tiny_config(config: Any) -> Any:
    """The configuration of a tiny model of this architecture: narrow, short, with each kind of layer.

    It is made anew from its values, so that what a class derives from sizes follows.
    """
    return type(config)(**_shrunk(config.to_dict()))


def _shrunk(given: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {n: _shrunk(v) if _is_part(v) else v for n, v in given.items()}
    layers: int = next((made[name] for name in _LAYERS if isinstance(made.get(name), int)), 0)
    chosen = _chosen_layers(made, layers)
    heads = _first(given, r"num_attention_heads|n_head|n_heads|num_heads")
    for name, value in made.items():
        if isinstance(value, list) and layers > 1 and len(value) == layers:  # one entry for each layer
            made[name] = [_entry(value[i]) for i in chosen]
        elif isinstance(value, int) and not isinstance(value, bool):
            made[name] = _smaller(name, value, heads, len(chosen))
        elif isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
            made[name] = _rotation(value, given)
    for name in made:
        if name.endswith(("token_id", "token_index")):
            made[name] = _token(made[name])
    _fit(made, given)
    if changed := _changed(given):
        made["per_layer_config"] = {
            number: {n: _scaled(v, given.get(n), made.get(n)) for n, v in changed[i].items()}
            for number, i in enumerate(chosen)
            if i in changed
        }
    if made.get("num_kv_shared_layers"):
        made["num_kv_shared_layers"] = len(chosen) // 2
    return made | _OWN.get(str(given.get("model_type")), {})


def _fit(made: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Sizes that are sums of others, or equal to them."""
    turned, plain = given.get("qk_rope_head_dim"), given.get("qk_nope_head_dim")
    if turned and given.get("head_dim") == turned:
        made["head_dim"] = made["qk_rope_head_dim"]
    if turned and plain and given.get("qk_head_dim") == turned + plain:
        made["qk_head_dim"] = made["qk_rope_head_dim"] + made["qk_nope_head_dim"]


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _first(given: Mapping[str, Any], pattern: str) -> int:
    found = (v for n, v in given.items() if re.fullmatch(pattern, n) and isinstance(v, int))
    return next(found, 0)


def _chosen_layers(given: Mapping[str, Any], layers: int) -> list[int]:
    """Numbers of the layers that are kept: two of them, and the first of each kind."""
    if layers < 2:
        return list(range(layers))
    per_layer = [v for v in given.values() if isinstance(v, list) and len(v) == layers]
    per_layer.append([_changed(given).get(number) for number in range(layers)])
    kinds: dict[str, int] = {}
    for number in range(layers):
        kinds.setdefault(str([one[number] for one in per_layer]), number)
    chosen = sorted(kinds.values()) if len(kinds) < 7 else list(range(6))
    if len(chosen) == 1:
        chosen = [0, 1]
    # layers at the end that read the keys of earlier ones are some more of each kind
    return chosen * 2 if given.get("num_kv_shared_layers") else chosen


def _changed(given: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What single layers have otherwise, by their numbers."""
    return {int(number): own for number, own in (given.get("per_layer_config") or {}).items()}


def _scaled(own: Any, given: Any, made: Any) -> Any:
    """A layer's own size, smaller by what the others' is."""
    return max(1, own * made // given) if isinstance(own, int) and given and made else own


def _entry(value: Any) -> Any:
    """One layer's own size."""
    return min(value, 48) if isinstance(value, int) and not isinstance(value, bool) else value


def _smaller(name: str, value: int, heads: int, layers: int) -> int:
    if name in _LAYERS:
        return layers
    if re.fullmatch(
        r"(\w+_)?num_key_value_heads|num_kv_heads|kv_n_heads|num_global_key_value_heads", name
    ):
        return HEADS if value == heads else min(value, 2)
    for pattern, most in _AT_MOST:
        if re.fullmatch(pattern, name):
            return min(value, most)
    return value


def _token(value: Any) -> Any:
    """A special token's number within the small vocabulary, other than that of most others."""
    if isinstance(value, list):
        return [_token(one) for one in value]
    is_outside = isinstance(value, int) and value >= VOCABULARY
    return VOCABULARY - 1 - value % 16 if is_outside else value


def _rotation(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of rotary embeddings for small heads; there may be one for each kind of layer."""
    made: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, dict):
            made[name] = _rotation(value, config)
        elif name == "mrope_section":
            size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            made[name] = _sections(value, sum(value) * HEAD // size)
        elif name.endswith("_factor") and isinstance(value, list):
            made[name] = value[: HEAD // 2]
        elif name == "original_max_position_embeddings":
            made[name] = min(int(value), 64)
        else:
            made[name] = value
    return made


def _sections(given: Sequence[int], whole: int) -> list[int]:
    """Parts of a head that turn with time, height and width, `whole` of them together."""
    rest = [max(1, whole * one // sum(given)) for one in given[1:]]
    return [whole - sum(rest), *rest]
