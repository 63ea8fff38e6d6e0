"""The engine: samples from the model that is being trained, many requests at once.

`EmbeddedEngine` runs a Hugging Face causal LM with a paged KV cache on its own thread; `FakeEngine`
stands in for it in tests. What it shares with the trainer is in `ludus.model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.engine.config import ENGINES, EngineConfig, EngineSetup, EngineStats
    from ludus.engine.embedded.block_manager import BlockManager, BlockPool, BlockTable
    from ludus.engine.embedded.core import EngineCore
    from ludus.engine.embedded.engine import EmbeddedEngine
    from ludus.engine.embedded.request import AdmissionQueue, Request, StopChecker
    from ludus.engine.embedded.scheduler import Scheduler
    from ludus.engine.fake import FakeCall, FakeEngine
    from ludus.engine.replicas.weights import Canary, CanaryError

__all__ = [
    "ENGINES",
    "AdmissionQueue",
    "BlockManager",
    "BlockPool",
    "BlockTable",
    "Canary",
    "CanaryError",
    "EmbeddedEngine",
    "EngineConfig",
    "EngineCore",
    "EngineSetup",
    "EngineStats",
    "FakeCall",
    "FakeEngine",
    "Request",
    "Scheduler",
    "StopChecker",
]

__getattr__, __dir__ = lazy_exports(__name__)
