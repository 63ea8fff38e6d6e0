"""Small caches, full batches, long queues: the tokens stay the same, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest
from engine_models import make, prompts, until

from ludus.core import Completion, ConfigError, EngineError, Sampling
from ludus.engine import EmbeddedEngine, EngineConfig


def _requests(count: int) -> list[tuple[list[int], Sampling]]:
    lengths = [5 + 7 * i % 40 for i in range(count)]
    return [
        (prompt, Sampling(max_tokens=16, temperature=0.8, seed=i))
        for i, prompt in enumerate(prompts(lengths, seed=3))
    ]


async def _all(engine: EmbeddedEngine, sessions: bool = False) -> list[Completion]:
    return await asyncio.gather(
        *(
            engine.generate(tokens, sampling, session=str(i) if sessions else None)
            for i, (tokens, sampling) in enumerate(_requests(12))
        )
    )


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(cache_tokens=96, block_size=4),
        EngineConfig(cache_tokens=80, block_size=16),
        EngineConfig(cache_tokens=200, block_size=4, max_running=5, tokens_per_step=7),
        EngineConfig(max_running=1, tokens_per_step=1),
        EngineConfig(block_size=1, max_waiting=2),
    ],
    ids=lambda config: str(config.model_dump(exclude_defaults=True)),
)
async def test_limits_change_the_order_of_work_not_its_result(config: EngineConfig) -> None:
    model = make()
    roomy, tight = EmbeddedEngine(model), EmbeddedEngine(model, config=config)
    expected = await _all(roomy)
    for sessions in (False, True):
        given = await _all(tight, sessions)
        assert [c.tokens for c in given] == [c.tokens for c in expected]
    if config.cache_tokens is not None and config.cache_tokens < 100:
        assert tight.stats.preemptions > 0
    assert roomy.stats.preemptions == 0
    tight._core.scheduler.block_manager.pool.check()
    await roomy.close()
    await tight.close()


async def test_nothing_is_left_behind() -> None:
    engine = EmbeddedEngine(make(), config=EngineConfig(cache_tokens=160, block_size=4))
    await _all(engine, sessions=True)
    for i in range(12):
        await engine.release(str(i))
    block_manager = engine._core.scheduler.block_manager
    block_manager.pool.check()
    assert block_manager.pool.available == block_manager.pool.blocks
    assert not engine._core.scheduler.active
    await engine.close()


async def test_idle_sessions_give_way_to_running_requests() -> None:
    engine = EmbeddedEngine(make(), config=EngineConfig(cache_tokens=64, block_size=4))
    first = prompts([30])[0]
    await engine.generate(first, Sampling(max_tokens=2), session="idle")
    await engine.generate(prompts([50], seed=9)[0], Sampling(max_tokens=10), session="busy")
    assert engine.stats.preemptions == 0
    again = await engine.generate(first, Sampling(max_tokens=2), session="idle")
    assert again.cached_tokens < 29
    await engine.close()


async def test_what_can_never_fit_is_refused_at_once() -> None:
    engine = EmbeddedEngine(make(), config=EngineConfig(cache_tokens=32))
    with pytest.raises(EngineError, match="cache_tokens") as raised:
        await engine.generate([1] * 20, Sampling(max_tokens=13))
    assert not raised.value.retriable
    with pytest.raises(EngineError, match="cache_tokens"):
        await engine.score([1] * 33)
    assert len((await engine.generate([1] * 20, Sampling(max_tokens=12))).tokens) == 12
    await engine.close()


async def test_callers_beyond_the_queue_wait_outside() -> None:
    engine = EmbeddedEngine(make(), config=EngineConfig(max_running=1, tokens_per_step=8, max_waiting=2))
    await engine.pause()
    tasks = [asyncio.create_task(engine.generate([i + 1], Sampling(max_tokens=2))) for i in range(6)]
    await until(lambda: len(engine._core.scheduler.waiting) == 2)
    await asyncio.sleep(0.02)
    assert len(engine._core.scheduler.waiting) == 2
    tasks[5].cancel()
    await engine.resume()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(r, Completion) for r in results] == [True] * 5 + [False]
    assert engine._admission.free == 2
    await engine.close()


def test_impossible_settings_name_the_key() -> None:
    with pytest.raises(ConfigError, match="tokens_per_step"):
        EngineConfig.parse({"max_running": 64, "tokens_per_step": 32})
    with pytest.raises(ConfigError, match="block_size"):
        EngineConfig.parse({"block_size": 0})
