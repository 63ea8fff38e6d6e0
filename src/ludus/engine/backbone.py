"""Where a causal language model keeps what: the decoder, its limits, its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.engine.attention import CONTEXT, AttentionContext


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


def hidden_states(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor, context: AttentionContext
) -> Tensor:
    """[T, hidden]: the decoder's last hidden states of flat tokens [T] in an attention context."""
    output = decoder_of(model)(
        input_ids=input_ids[None],
        position_ids=position_ids.reshape(1, -1),
        use_cache=False,
        **{CONTEXT: context},
    )
    states: Tensor = output.last_hidden_state[0]
    return states


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
