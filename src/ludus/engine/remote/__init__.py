"""A model behind an OpenAI-compatible address as an engine: for evaluation, never for training.

`RemoteEngine` sends contexts over HTTP and takes text back. With the model's own tokenizer it continues
token ids (`/completions`); with a `TranscriptTokenizer`, which needs no files, it sends messages
(`/chat/completions`).
"""

from ludus.engine.remote.engine import RemoteEngine, RemoteOptions
from ludus.engine.remote.openai_api import TranscriptTokenizer

__all__ = ["RemoteEngine", "RemoteOptions", "TranscriptTokenizer"]
