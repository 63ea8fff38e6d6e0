"""Tokens that engines report while they sample: early, in order, the completion's own, none once it is over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_models import VOCABULARY, make, prompts

from ludus.core import EngineError, Sampling
from ludus.core.tokenizer import ByteTokenizer
from ludus.engine import EmbeddedEngine, EngineConfig, FakeEngine


def engine_of(**changes: Any) -> EmbeddedEngine:
    return EmbeddedEngine(make(), None, EngineConfig(cache_tokens=2048, block_size=4, **changes))


async def test_reported_tokens_are_the_completions_own() -> None:
    engine = engine_of()
    told: list[list[int]] = [[] for _ in range(4)]
    samplings = [Sampling(max_tokens=20, seed=seed) for seed in range(4)]
    asked = prompts([5, 9, 3, 7])
    streamed = await asyncio.gather(
        *(
            engine.generate(prompt, sampling, on_tokens=list_.extend)
            for prompt, sampling, list_ in zip(asked, samplings, told, strict=True)
        )
    )
    plain = [await engine.generate(p, s) for p, s in zip(asked, samplings, strict=True)]
    for completion, same, early in zip(streamed, plain, told, strict=True):
        assert completion.tokens == same.tokens
        assert early == completion.tokens[: len(early)] and len(early) == len(completion.tokens) - 1
    await engine.close()


async def test_preemption_and_new_weights_repeat_nothing() -> None:
    """A small cache preempts; weights change in flight: tokens are reported once all the same."""
    engine = EmbeddedEngine(make(), None, EngineConfig(cache_tokens=96, block_size=4, max_running=4))
    told: list[list[int]] = [[] for _ in range(4)]
    running = [
        asyncio.create_task(
            engine.generate(prompt, Sampling(max_tokens=40, seed=n), on_tokens=told[n].extend)
        )
        for n, prompt in enumerate(prompts([5, 5, 5, 5]))
    ]
    while not all(told):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await engine.pause()
    await engine.update_weights()
    await engine.resume()
    for early, completion in zip(told, await asyncio.gather(*running), strict=True):
        assert early == completion.tokens[:-1]
    assert engine.stats.preemptions and not engine._thread.outbox.streams
    await engine.close()


async def test_nothing_is_reported_to_a_caller_that_is_gone() -> None:
    engine = engine_of()
    told: list[int] = []
    running = asyncio.create_task(
        engine.generate(prompts([4])[0], Sampling(max_tokens=500), on_tokens=told.extend)
    )
    while not told:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    count = len(told)
    await engine.generate(prompts([4])[0], Sampling(max_tokens=10))
    assert len(told) == count and not engine._thread.outbox.streams
    await engine.close()


async def test_a_refused_request_leaves_no_stream_behind() -> None:
    engine = engine_of()
    told: list[int] = []
    first = asyncio.create_task(
        engine.generate(prompts([4])[0], Sampling(max_tokens=30), session="s", on_tokens=told.extend)
    )
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="already has a request"):
        await engine.generate([1, 2], Sampling(), session="s", on_tokens=told.extend)
    completion = await first
    assert told == completion.tokens[:-1]
    await engine.generate(prompts([3])[0], Sampling(max_tokens=5))
    assert not engine._thread.outbox.streams and max(completion.tokens) < VOCABULARY
    await engine.close()


async def test_the_fake_engine_reports_one_by_one_and_keeps_them_when_aborted() -> None:
    tokenizer = ByteTokenizer()
    engine = FakeEngine(["hello", "a longer reply"], tokenizer, seconds=0.2)
    told: list[int] = []
    completion = await engine.generate([1], Sampling(), on_tokens=told.extend)
    assert told == completion.tokens[:-1]
    told.clear()
    running = asyncio.create_task(engine.generate([1], Sampling(), session="s", on_tokens=told.extend))
    while len(told) < 9:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await engine.abort("s")
    assert (await running).tokens[: len(told)] == told
