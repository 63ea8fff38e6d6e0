"""Tiny random models of the families that the engine promises to run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "smollm2": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": 6},
    ),
}


def make(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A model with large enough random weights that its choices depend on its context."""
    config_type, model_type, own = FAMILIES[family]
    torch.manual_seed(0)
    model: PreTrainedModel = model_type(config_type(**{**_SHAPE, **own, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    return model


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread to get there; the test's own timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - what is awaited happens on the engine's thread
        await asyncio.sleep(0.001)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY - 1, (n,), generator=generator).tolist() for n in lengths]


def stock_greedy(model: PreTrainedModel, prompt: list[int], new: int, **settings: Any) -> list[int]:
    """What transformers itself generates, with its eager attention and its own cache."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
            **settings,
        )
    finally:
        model.set_attn_implementation(before)
    return output[0, len(prompt) :].tolist()


def plain_logprobs(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities by one full forward pass with the model's own eager attention; first is 0."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].double() / temperature
    finally:
        model.set_attn_implementation(before)
    values = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return [0.0, *values.tolist()]
