"""The engine against stock `generate`: greedy, token for token, for every family it promises."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_models import FAMILIES, make, prompts, stock_greedy
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from ludus.core import ConfigError, Sampling
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.model import use_ludus_attention
from ludus.model.hf_model import rows_alone

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
}


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_are_those_of_stock_generate(family: str) -> None:
    model = make(family)
    contexts = prompts([1, 5, 16, 17, 23, 40])
    expected = [stock_greedy(model, context, 24) for context in contexts]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    # Few tokens per step: prompts are computed in chunks, mixed with decoding.
    engine = EmbeddedEngine(model, config=EngineConfig(max_running=4, tokens_per_step=13))
    sampling = Sampling(max_tokens=24, temperature=0)
    given = await asyncio.gather(*(engine.generate(context, sampling) for context in contexts))
    assert [completion.tokens for completion in given] == expected
    await engine.close()


async def test_a_repetition_penalty_counts_what_was_said_as_well_as_the_prompt() -> None:
    model = make()
    context = prompts([6])[0]
    expected = stock_greedy(model, context, 40, repetition_penalty=1.7)
    assert expected != stock_greedy(model, context, 40)
    engine = EmbeddedEngine(model)
    sampling = Sampling(max_tokens=40, temperature=0, repetition_penalty=1.7)
    assert (await engine.generate(context, sampling)).tokens == expected
    await engine.close()


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            lambda: GraniteForCausalLM(GraniteConfig(**_SMALL, logits_scaling=3.0)), id="granite"
        ),
        pytest.param(lambda: CohereForCausalLM(CohereConfig(**_SMALL, logit_scale=0.3)), id="cohere"),
        pytest.param(
            lambda: Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**_SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
            ),
            id="qwen3-moe",
        ),
    ],
)
async def test_further_families(model: object) -> None:
    torch.manual_seed(0)
    built = model().eval()  # type: ignore[operator]
    context = prompts([21])[0]
    expected = stock_greedy(built, context, 12)
    engine = EmbeddedEngine(built)
    completion = await engine.generate(context, Sampling(max_tokens=12, temperature=0))
    assert completion.tokens == expected
    await engine.close()


def test_a_window_that_only_the_mask_knows_is_not_read_by_ludus() -> None:
    model = make("mistral", sliding_window=200)
    model.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ConfigError, match="window"):
        use_ludus_attention(model, or_alone=False)
    use_ludus_attention(model)
    assert "window" in str(rows_alone(model))
    assert model.config._attn_implementation != "ludus"


def test_a_model_without_attention_is_refused() -> None:
    model = RwkvForCausalLM(
        RwkvConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
    )
    with pytest.raises(ConfigError, match="Rwkv"):
        use_ludus_attention(model.eval(), or_alone=False)


def test_a_head_that_does_something_unknown_is_refused() -> None:
    class Shifted(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + torch.arange(self.config.vocab_size)
            return output

    model = Shifted(make().config).eval()
    with pytest.raises(ConfigError, match="logits"):
        use_ludus_attention(model)


def test_a_rotation_that_depends_on_the_batch_is_refused():
    half = 4
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * half,
            "long_factor": [4.0] * half,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
        },
    )
    with pytest.raises(ConfigError, match="longrope"):
        use_ludus_attention(LlamaForCausalLM(config))
