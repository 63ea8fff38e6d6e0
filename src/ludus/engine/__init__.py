"""The engine: samples from the model that is being trained, many requests at once.

`EmbeddedEngine` runs a Hugging Face causal LM with a paged KV cache on its own thread; `FakeEngine`
stands in for it in tests. `PackedContext`, `ForestContext`, `hidden_states` and `head_logits` are how a trainer
runs the same module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.engine.attention import AttentionParams
    from ludus.engine.block_manager import BlockManager, BlockPool, BlockTable
    from ludus.engine.config import EngineConfig, EngineStats
    from ludus.engine.engine import EmbeddedEngine
    from ludus.engine.engine_core import EngineCore
    from ludus.engine.engine_thread import AdmissionQueue
    from ludus.engine.fake import FakeCall, FakeEngine
    from ludus.engine.forest_attention import ForestContext, can_share_prefixes
    from ludus.engine.hf_model import (
        checkpointable_layers,
        checkpointed_layers,
        context_limit,
        decoder_of,
        sampling_mode,
        set_activation_checkpointing,
        unwrapped,
        vocabulary_size,
    )
    from ludus.engine.image_features import embedded
    from ludus.engine.images import images_of
    from ludus.engine.model_runner import head_logits, hidden_states, plain_head
    from ludus.engine.packed_attention import PackedContext
    from ludus.engine.request import Request, StopChecker
    from ludus.engine.scheduler import Scheduler
    from ludus.engine.self_check import probe_head, use_ludus_attention

__all__ = [
    "AdmissionQueue",
    "AttentionParams",
    "BlockManager",
    "BlockPool",
    "BlockTable",
    "EmbeddedEngine",
    "EngineConfig",
    "EngineCore",
    "EngineStats",
    "FakeCall",
    "FakeEngine",
    "ForestContext",
    "PackedContext",
    "Request",
    "Scheduler",
    "StopChecker",
    "can_share_prefixes",
    "checkpointable_layers",
    "checkpointed_layers",
    "context_limit",
    "decoder_of",
    "embedded",
    "head_logits",
    "hidden_states",
    "images_of",
    "plain_head",
    "probe_head",
    "sampling_mode",
    "set_activation_checkpointing",
    "unwrapped",
    "use_ludus_attention",
    "vocabulary_size",
]

__getattr__, __dir__ = lazy_exports(__name__)
