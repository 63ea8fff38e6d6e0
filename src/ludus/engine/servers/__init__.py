"""A model behind an address as an engine.

`RemoteEngine` is for evaluation: it sends contexts to an OpenAI-compatible server and takes text back. With
the model's own tokenizer it continues token ids (`/completions`); with a `TranscriptTokenizer`, which needs no
files, it sends messages (`/chat/completions`). `VllmEngine` is for training: a vLLM server gets the trained
weights, and gives exact tokens, log-probabilities and versions back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.engine.servers.openai import RemoteEngine, RemoteOptions, TranscriptTokenizer
    from ludus.engine.servers.vllm import VllmEngine
    from ludus.engine.servers.vllm_server import VllmOptions, VllmServer

__all__ = [
    "RemoteEngine",
    "RemoteOptions",
    "TranscriptTokenizer",
    "VllmEngine",
    "VllmOptions",
    "VllmServer",
]

__getattr__, __dir__ = lazy_exports(__name__)
