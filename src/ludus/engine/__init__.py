"""The engine: samples from the model that is being trained, many requests at once.

`EmbeddedEngine` runs a Hugging Face causal LM with a paged KV cache on its own thread; `FakeEngine`
stands in for it in tests. `PackedContext`, `hidden_states` and `head_logits` are how a trainer runs the
same module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.engine.config import EngineConfig
    from ludus.engine.engine import EmbeddedEngine
    from ludus.engine.engine_core import EngineStats
    from ludus.engine.fake import FakeCall, FakeEngine
    from ludus.engine.hf_model import (
        context_limit,
        decoder_of,
        sampling_mode,
        vocabulary_size,
    )
    from ludus.engine.loading import probe_head, use_ludus_attention
    from ludus.engine.model_runner import head_logits, hidden_states
    from ludus.engine.packed_attention import PackedContext

__all__ = [
    "EmbeddedEngine",
    "EngineConfig",
    "EngineStats",
    "FakeCall",
    "FakeEngine",
    "PackedContext",
    "context_limit",
    "decoder_of",
    "head_logits",
    "hidden_states",
    "probe_head",
    "sampling_mode",
    "use_ludus_attention",
    "vocabulary_size",
]

__getattr__, __dir__ = lazy_exports(__name__)
