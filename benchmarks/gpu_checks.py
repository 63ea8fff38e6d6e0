"""What the decode benchmark's numbers are worth: the engine against the trainer, float32 and itself."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from gpu_common import random_model
from transformers import PreTrainedModel

from ludus.core import Completion, Sampling
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.training import Batch, logprobs_of

TOKENS = 10_240
NEW = 64


def _prompts(model: PreTrainedModel, batch: int, context: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, model.config.vocab_size, (batch, context), generator=generator).tolist()


async def _generate(
    engine: EmbeddedEngine, contexts: list[list[int]], numbers: list[int], new: int, temperature: float
) -> list[Completion]:
    return await asyncio.gather(
        *(
            engine.generate(contexts[i], Sampling(max_tokens=new, seed=i, temperature=temperature))
            for i in numbers
        )
    )


def _differences(left: list[float], right: list[float]) -> dict[str, float]:
    apart = (torch.tensor(left, dtype=torch.float64) - torch.tensor(right, dtype=torch.float64)).abs()
    return {"mean difference": float(apart.mean()), "max difference": float(apart.max())}


def trained(model: PreTrainedModel, sequences: list[list[int]], prompt: int) -> list[float]:
    """What the trainer computes for every generated token."""
    masks = [[i >= prompt for i in range(len(tokens))] for tokens in sequences]
    batch = Batch.of_tokens(sequences, masks)
    return logprobs_of(model, batch, 1.0, 16384)[batch.action_T].tolist()


def stock(
    name: str, sequences: list[list[int]], prompt: int, device: str, dtype: torch.dtype
) -> list[float]:
    """Log-probabilities of these weights through the Hugging Face model's own forward pass, a row at a time."""
    model = random_model(name, device, dtype)
    values: list[float] = []
    with torch.inference_mode():
        for tokens in sequences:
            ids = torch.tensor([tokens], device=device)
            logits = model(ids, logits_to_keep=len(tokens) - prompt + 1).logits[0, :-1]
            chosen = logits.float().log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0]
            values += chosen.tolist()
    return values


async def check(name: str, model: PreTrainedModel, device: str) -> list[dict[str, Any]]:
    """Rows of a table: what was compared, over how many tokens, how far apart."""
    batch, prompt = TOKENS // NEW, 128
    contexts = _prompts(model, batch, prompt)
    engine = EmbeddedEngine(model, config=EngineConfig(cache_tokens=batch * (prompt + NEW + 32)))
    answers = await _generate(engine, contexts, list(range(batch)), NEW, 1.0)
    given = [value for answer in answers for value in answer.logprobs]
    sequences = [context + answer.tokens for context, answer in zip(contexts, answers, strict=True)]
    crowd = await asyncio.gather(*(engine.score(tokens) for tokens in sequences))
    alone = [await engine.score(tokens) for tokens in sequences[:16]]
    scores = [[value for one in found[:16] for value in one[prompt:]] for found in (alone, crowd)]
    await engine.pause()
    trainer = trained(model, sequences, prompt)
    await engine.close()
    exact = stock(name, sequences, prompt, device, torch.float32)
    rounded = stock(name, sequences, prompt, device, torch.bfloat16)
    rows: list[dict[str, Any]] = [
        _compared(name, what, left, right)
        for what, left, right in (
            ("engine and trainer, bf16", given, trainer),
            ("engine bf16 and float32", given, exact),
            ("trainer bf16 and float32", trainer, exact),
            ("stock bf16 and float32", rounded, exact),
        )
    ]
    rows.append(_compared(name, "scored alone and in company, bf16", *scores))
    rows.append(await _neighbours(name, device))
    rows.append(await _greedy(name, device))
    return rows


def _compared(name: str, what: str, left: list[float], right: list[float]) -> dict[str, Any]:
    return {"shape": name, "compared": what, "tokens": len(left), **_differences(left, right)}


async def _neighbours(name: str, device: str, batch: int = 64, new: int = 64) -> dict[str, Any]:
    """Sampled answers in float32, of 8 requests by themselves and among others."""
    model = random_model(name, device, torch.float32)
    contexts = _prompts(model, batch, 40)
    engine = EmbeddedEngine(model, config=EngineConfig(cache_tokens=batch * (40 + new + 32)))
    crowd = await _generate(engine, contexts, list(range(batch)), new, 1.0)
    await engine.forget()
    alone = [(await _generate(engine, contexts, [i], new, 1.0))[0] for i in range(8)]
    await engine.close()
    same = sum(one.tokens == other.tokens for one, other in zip(alone, crowd, strict=False))
    left, right = ([value for one in found[:8] for value in one.logprobs] for found in (alone, crowd))
    what = f"decoded alone and in company, float32: {same} of 8 answers the same"
    return _compared(name, what, left, right) if same == 8 else {"shape": name, "compared": what}


async def _greedy(name: str, device: str, batch: int = 8, new: int = 48) -> dict[str, Any]:
    """Greedy tokens in float32 against stock `generate`."""
    model = random_model(name, device, torch.float32)
    contexts = _prompts(model, batch, 40)
    ids = torch.tensor(contexts, device=device)
    with torch.inference_mode():
        stock = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )[:, ids.shape[1] :].tolist()
    engine = EmbeddedEngine(model, config=EngineConfig(cache_tokens=batch * (40 + new + 32)))
    ours = await _generate(engine, contexts, list(range(batch)), new, 0.0)
    await engine.close()
    same = sum(answer.tokens == tokens for answer, tokens in zip(ours, stock, strict=True))
    return {
        "shape": name,
        "compared": f"greedy in float32: {same} of {batch} answers equal stock generate",
        "tokens": batch * new,
    }
