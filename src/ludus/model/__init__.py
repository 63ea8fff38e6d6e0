"""The model that is sampled and trained: what engine and trainer share of a Hugging Face causal LM.

One attention function serves both (`attention`); `PackedContext` and `ForestContext` are how a trainer runs the
module, `hidden_states` and `head_logits` run it on flat tokens; probes refuse models that compute otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.model.attention import AttentionParams
    from ludus.model.forest_attention import ForestContext, can_share_prefixes
    from ludus.model.forward import head_logits, hidden_states, plain_head
    from ludus.model.hf_model import (
        checkpointable_layers,
        checkpointed_layers,
        context_limit,
        decoder_of,
        sampling_mode,
        set_activation_checkpointing,
        unwrapped,
        vocabulary_size,
    )
    from ludus.model.images import images_of
    from ludus.model.packed_attention import PackedContext
    from ludus.model.probes import (
        probe_architecture,
        probe_head,
        switch_attention,
        use_ludus_attention,
    )

__all__ = [
    "AttentionParams",
    "ForestContext",
    "PackedContext",
    "can_share_prefixes",
    "checkpointable_layers",
    "checkpointed_layers",
    "context_limit",
    "decoder_of",
    "head_logits",
    "hidden_states",
    "images_of",
    "plain_head",
    "probe_architecture",
    "probe_head",
    "sampling_mode",
    "set_activation_checkpointing",
    "switch_attention",
    "unwrapped",
    "use_ludus_attention",
    "vocabulary_size",
]

__getattr__, __dir__ = lazy_exports(__name__)
