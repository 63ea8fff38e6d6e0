"""The engine: samples from the model that is being trained, many requests at once.

`EmbeddedEngine` runs a Hugging Face causal LM with a paged KV cache on its own thread; `FakeEngine`
stands in for it in tests. `PackedContext`, `hidden_states` and `head_logits` are how a trainer runs the
same module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.engine.adopt import use_ludus_attention
    from ludus.engine.backbone import (
        context_limit,
        decoder_of,
        sampling_mode,
        vocabulary_size,
    )
    from ludus.engine.config import EngineConfig
    from ludus.engine.embedded import EmbeddedEngine
    from ludus.engine.fake import FakeCall, FakeEngine
    from ludus.engine.forward import hidden_states
    from ludus.engine.head import head_logits, probe_head
    from ludus.engine.packed import PackedContext
    from ludus.engine.worker import EngineStats

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
