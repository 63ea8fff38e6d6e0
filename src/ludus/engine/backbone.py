"""Where a causal language model keeps what: the decoder, its limits, its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ludus.core.failures import ConfigError


def unwrapped(model: nn.Module) -> Any:
    """The Hugging Face model inside an adapter wrapper (PEFT), or the model itself."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def decoder_of(model: nn.Module) -> Any:
    """The part of a causal LM below its head."""
    inner = unwrapped(model)
    if not hasattr(inner, "get_decoder") or inner.get_output_embeddings() is None:
        raise ConfigError(f"{type(inner).__name__} is not a Hugging Face causal language model")
    decoder = inner.get_decoder()
    if decoder is inner:
        raise ConfigError(f"{type(inner).__name__} does not say which part of it is the decoder")
    return decoder


def text_config(model: nn.Module) -> Any:
    """The configuration of the language part."""
    return unwrapped(model).config.get_text_config()


def context_limit(model: nn.Module) -> int | None:
    """How many tokens the model can look at; None when it does not say."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return int(limit) if limit else None


def vocabulary_size(model: nn.Module) -> int:
    """How many ids the embedding knows."""
    return int(unwrapped(model).get_input_embeddings().weight.shape[0])


def embedding_device(model: nn.Module) -> torch.device:
    """Where tokens enter the model."""
    device: torch.device = decoder_of(model).get_input_embeddings().weight.device
    return device


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off; each module gets its own mode back afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
