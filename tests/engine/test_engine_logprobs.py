"""Log-probabilities of the engine against one plain forward pass over the whole episode."""

from __future__ import annotations

import pytest
from engine_models import FAMILIES, make, plain_logprobs, prompts

from ludus.core import Sampling
from ludus.engine import EmbeddedEngine, EngineConfig


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
async def test_multi_turn_logprobs_with_prefix_reuse(family: str, temperature: float) -> None:
    model = make(family)
    engine = EmbeddedEngine(model)
    context = prompts([19])[0]
    actions: list[tuple[int, list[float]]] = []
    for turn, observation in enumerate(prompts([7, 1, 30], seed=1)):
        sampling = Sampling(max_tokens=11, temperature=temperature, seed=turn)
        completion = await engine.generate(context, sampling, session="episode")
        assert (completion.cached_tokens > 0) == (turn > 0)
        actions.append((len(context), completion.logprobs))
        context = context + completion.tokens + observation
    expected = plain_logprobs(model, context, temperature)
    for start, given in actions:
        assert given == pytest.approx(expected[start : start + len(given)], abs=1e-4)
    await engine.close()


async def test_score_is_a_plain_forward_pass_in_chunks() -> None:
    model = make("gemma2")
    engine = EmbeddedEngine(model, config=EngineConfig(max_running=2, tokens_per_step=9))
    tokens = prompts([50])[0]
    given = await engine.score(tokens)
    assert given == pytest.approx(plain_logprobs(model, tokens), abs=1e-4)
    assert await engine.score(tokens[:1]) == [0.0]
    await engine.close()


async def test_greedy_reports_the_distribution_at_temperature_one() -> None:
    model = make()
    engine = EmbeddedEngine(model)
    context = prompts([9])[0]
    completion = await engine.generate(context, Sampling(max_tokens=6, temperature=0))
    expected = plain_logprobs(model, context + completion.tokens)
    assert completion.logprobs == pytest.approx(expected[9:], abs=1e-4)
    await engine.close()


async def test_truncation_and_penalty_do_not_change_what_is_reported() -> None:
    model = make()
    engine = EmbeddedEngine(model)
    context = prompts([9])[0]
    sampling = Sampling(max_tokens=20, top_p=0.7, top_k=20, min_p=0.01, repetition_penalty=1.3, seed=4)
    completion = await engine.generate(context, sampling)
    expected = plain_logprobs(model, context + completion.tokens)
    assert completion.logprobs == pytest.approx(expected[9:], abs=1e-4)
    await engine.close()
