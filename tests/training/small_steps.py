"""A tiny model in any data type, and steps of imitation on a few rows of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ludus.model import use_ludus_attention
from ludus.training import Batch, Learner, MicroBatch, OptimizerConfig, micro_batches

VOCABULARY = 50


def small_model(dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    """Weights of the size that models have; in half precision the very same, rounded."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**settings | changes)).to(torch.bfloat16)
    model = model.to(dtype)
    use_ludus_attention(model)
    return model


def learner_of(model: nn.Module, **settings: object) -> Learner:
    config = OptimizerConfig(**{"learning_rate": 1e-3, "max_gradient_norm": 1e9} | settings)
    return Learner(model, config, total_steps=100)


def rows_of_lengths(lengths: Sequence[int], seed: int = 0) -> Batch:
    source = random.Random(seed)
    rows: list[list[int]] = []
    masks: list[list[bool]] = []
    for length in lengths:
        mask = [False] + [source.random() < 0.7 for _ in range(length - 1)]
        mask[-1] = True
        rows.append([source.randrange(VOCABULARY) for _ in range(length)])
        masks.append(mask)
    return Batch.of_tokens(rows, masks, logprob=-2.0)


def packs(batch: Batch, budget: int = 1 << 14) -> Iterator[MicroBatch]:
    return micro_batches(weighed(batch), budget)


def weighed(batch: Batch) -> Batch:
    """With advantages from -1 to 1, each token of the same weight."""
    weights_T = torch.full((len(batch.tokens_T),), 1 / int(batch.action_T.sum()))
    advantages_T = torch.linspace(-1, 1, len(weights_T))
    return replace(batch, advantages_T=advantages_T, weights_T=weights_T)


def imitation(
    logprobs_A: Tensor, entropy_A: Tensor, batch: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs_A, {"surprise": -logprobs_A, "surprise_max": -logprobs_A}


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().float().clone() for p in model.parameters()]


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
