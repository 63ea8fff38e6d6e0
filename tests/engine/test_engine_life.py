"""Pausing, new weights, aborts, cancelled callers, broken models, closing: nothing hangs or leaks."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from engine_models import make, plain_logprobs, prompts, stock_greedy, until

from ludus.core import ConfigError, Engine, EngineError, FinishReason, Media, Sampling, VersionSpan
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.engine.embedded import engine as engine_module
from ludus.remote.limits import time_limit

GREEDY = Sampling(max_tokens=6, temperature=0)
LONG = Sampling(max_tokens=200, temperature=0)


def _perturb(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)


async def test_it_is_an_engine() -> None:
    engine = EmbeddedEngine(make())
    assert isinstance(engine, Engine)
    await engine.close()


async def test_new_weights_drop_what_was_cached() -> None:
    model = make()
    engine = EmbeddedEngine(model)
    context = prompts([20])[0]
    old = await engine.generate(context, GREEDY, session="s")
    await engine.pause()
    _perturb(model)
    assert await engine.update_weights() == engine.policy_version == 1
    await engine.resume()
    new = await engine.generate(context, GREEDY, session="s")
    assert new.cached_tokens == 0
    assert new.tokens == stock_greedy(model, context, 6) != old.tokens
    assert (old.versions, new.versions) == ((VersionSpan(0, 0),), (VersionSpan(0, 1),))
    await engine.close()


async def test_new_weights_in_the_middle_of_an_action() -> None:
    model = make()
    engine = EmbeddedEngine(model)
    context = prompts([20])[0]
    task = asyncio.create_task(engine.generate(context, LONG, session="s"))
    await until(lambda: engine.stats.generated_tokens > 5)
    await engine.pause()
    so_far = engine.stats.generated_tokens
    before = stock_greedy(model, context, so_far)
    _perturb(model)
    await engine.update_weights()
    await engine.update_weights()
    await asyncio.sleep(0.02)
    assert engine.stats.generated_tokens == so_far
    assert not task.done()
    await engine.resume()
    completion = await task
    assert completion.versions == (VersionSpan(0, 0), VersionSpan(so_far, 2))
    assert completion.tokens[:so_far] == before
    # What follows is computed under the new weights, the past included.
    assert completion.tokens[so_far:] == stock_greedy(model, context + before, 200 - so_far)
    expected = plain_logprobs(model, context + completion.tokens)[20 + so_far :]
    assert completion.logprobs[so_far:] == pytest.approx(expected, abs=1e-4)
    await engine.close()


async def test_kv_of_older_weights_is_kept_where_that_is_asked_for() -> None:
    """The request goes on without computing its context again; others do not find what is stale."""
    model = make()
    engine = EmbeddedEngine(model, config=EngineConfig(keep_kv=True))
    context = prompts([20])[0]
    task = asyncio.create_task(engine.generate(context, LONG, session="s"))
    await until(lambda: engine.stats.generated_tokens > 5)
    await engine.pause()
    so_far, computed = engine.stats.generated_tokens, engine.stats.computed_tokens
    before = stock_greedy(model, context, so_far)
    _perturb(model)
    assert await engine.update_weights() == 1
    await engine.resume()
    completion = await task
    assert completion.versions == (VersionSpan(0, 0), VersionSpan(so_far, 1))
    assert completion.tokens[:so_far] == before
    assert engine.stats.computed_tokens - computed == 200 - so_far
    fresh = await engine.generate(context, GREEDY)
    assert fresh.cached_tokens == 0 and fresh.tokens == stock_greedy(model, context, 6)
    await engine.close()


def test_kept_kv_cannot_be_given_away() -> None:
    with pytest.raises(ConfigError, match="keep_kv keeps it"):
        EngineConfig.parse({"keep_kv": True, "release_memory": "always"})


async def test_new_weights_in_the_middle_of_a_score() -> None:
    model = make()
    engine = EmbeddedEngine(model, config=EngineConfig(max_running=1, tokens_per_step=2))
    tokens = prompts([150])[0]
    task = asyncio.create_task(engine.score(tokens))
    await until(lambda: engine.stats.computed_tokens > 10)
    await engine.pause()
    assert engine.stats.computed_tokens < 150
    _perturb(model)
    await engine.update_weights()
    await engine.resume()
    assert await task == pytest.approx(plain_logprobs(model, tokens), abs=1e-4)
    await engine.close()


async def test_abort_gives_what_there_is() -> None:
    model = make()
    engine = EmbeddedEngine(model, config=EngineConfig(max_running=1, max_waiting=1))
    context = prompts([20])[0]
    tasks = [asyncio.create_task(engine.generate(context, LONG, session=f"{i}")) for i in range(3)]
    await until(lambda: engine.stats.generated_tokens > 3)
    for i in (2, 1, 0):  # at the turnstile, in the queue, in the batch
        await engine.abort(f"{i}")
    first, second, third = await asyncio.gather(*tasks)
    assert first.finish is second.finish is third.finish is FinishReason.ABORTED
    assert 3 < len(first.tokens) < 200
    assert first.tokens == stock_greedy(model, context, len(first.tokens))
    assert second.tokens == third.tokens == []
    await engine.abort("nobody")
    assert (await engine.generate(context, GREEDY, session="0")).cached_tokens == 19
    await engine.close()


async def test_a_cancelled_caller_takes_its_request_back() -> None:
    engine = EmbeddedEngine(make(), config=EngineConfig(max_running=1))
    tasks = [asyncio.create_task(engine.generate([1, 2, 3], LONG)) for _ in range(2)]
    await until(lambda: engine.stats.generated_tokens > 3)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await engine.pause()
    scheduler = engine._core.scheduler
    assert not scheduler.has_work
    assert not engine._thread.outbox.unresolved
    assert scheduler.block_manager.pool.available == scheduler.block_manager.pool.blocks
    await engine.resume()
    assert len((await engine.generate([1], GREEDY)).tokens) == 6
    await engine.close()


async def test_a_session_has_one_request_at_a_time() -> None:
    engine = EmbeddedEngine(make())
    first = asyncio.create_task(engine.generate([1, 2], LONG, session="s"))
    await until(lambda: engine.stats.generated_tokens > 0)
    with pytest.raises(EngineError, match="already has a request"):
        await engine.generate([1, 2], GREEDY, session="s")
    with pytest.raises(EngineError, match="running"):
        await engine.fork("t", "s")
    await engine.release("s")
    assert len((await first).tokens) == 200
    assert (await engine.generate([1, 2], GREEDY, session="s")).tokens
    await engine.close()


async def test_a_model_that_raises_fails_the_step_and_not_the_engine() -> None:
    model = make()
    engine = EmbeddedEngine(model)
    context = prompts([20])[0]
    expected = await engine.generate(context, GREEDY, session="s")

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = model.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(EngineError, match="out of memory") as raised:
        await engine.generate(context, GREEDY, session="s")
    assert raised.value.retriable
    assert isinstance(raised.value.__cause__, RuntimeError)
    hook.remove()
    again = await engine.generate(context, GREEDY, session="s")
    assert (again.tokens, again.cached_tokens) == (expected.tokens, 0)
    assert engine.stats.failed_steps == 1
    await engine.close()


async def test_diverged_weights_are_an_error_and_spoil_nothing_that_follows() -> None:
    model = make()
    engine = EmbeddedEngine(model, config=EngineConfig(block_size=64))
    context = prompts([20])[0]
    expected = await engine.generate(context[:5], GREEDY)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    await engine.pause()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.fill_(float("nan"))
    await engine.update_weights()
    await engine.resume()
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(context, GREEDY, session="s")
    await engine.pause()
    model.load_state_dict(saved)
    await engine.update_weights()
    await engine.resume()
    assert (await engine.generate(context[:5], GREEDY, session="s")).tokens == expected.tokens
    await engine.close()


async def test_dropout_is_off_while_sampling_and_back_on_afterwards() -> None:
    model = make(attention_dropout=0.5)
    model.train()
    model.lm_head.eval()
    context = prompts([20])[0]
    expected = stock_greedy(make(attention_dropout=0.5), context, 6)
    engine = EmbeddedEngine(model)
    assert (await engine.generate(context, GREEDY)).tokens == expected
    running = asyncio.create_task(engine.generate(context, LONG))
    await until(lambda: engine.stats.generated_tokens > 10)
    await engine.pause()
    assert model.training
    assert model.model.layers[0].training
    assert not model.lm_head.training
    model(torch.tensor([context])).logits.sum().backward()
    await engine.resume()
    await running
    await engine.close()
    assert model.training


async def test_closing_answers_everybody() -> None:
    engine = EmbeddedEngine(make(), config=EngineConfig(max_running=1, max_waiting=1))
    tasks = [asyncio.create_task(engine.generate([1, 2], LONG)) for _ in range(4)]
    await until(lambda: engine.stats.generated_tokens > 3)
    await engine.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineError) and not result.retriable for result in results)
    for call in (
        engine.generate([1], GREEDY), engine.score([1]), engine.pause(), engine.fork("a", "b"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match="closed"):
            await call
    await engine.release("s")
    await engine.abort("s")
    await engine.close()
    assert not [t for t in threading.enumerate() if t.name == "ludus-engine"]


async def test_a_mistake_of_the_engine_itself_is_told_to_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EmbeddedEngine(make())

    def broken() -> None:
        raise KeyError("row")

    monkeypatch.setattr(engine._core.scheduler, "plan", broken)
    results = await asyncio.gather(
        engine.generate([1], GREEDY), engine.generate([2], GREEDY), return_exceptions=True
    )
    assert all(isinstance(r, EngineError) and "KeyError" in str(r) for r in results)
    with pytest.raises(EngineError, match="make a new one"):
        await engine.generate([1], GREEDY)
    await engine.close()


async def test_media_are_refused() -> None:
    engine = EmbeddedEngine(make())
    with pytest.raises(EngineError, match="text only"):
        await engine.generate([1], GREEDY, media=[Media("image", "0" * 64)])
    await engine.close()


def test_several_event_loops_one_after_the_other() -> None:
    engine = EmbeddedEngine(make())
    first = asyncio.run(engine.generate([1, 2, 3], GREEDY, session="s"))
    second = asyncio.run(engine.generate([1, 2, 3], GREEDY, session="s"))
    assert first.tokens == second.tokens
    assert second.cached_tokens == 2

    async def abandoned() -> None:
        asyncio.create_task(engine.generate([4], LONG))  # noqa: RUF006
        await asyncio.sleep(0.01)

    asyncio.run(abandoned())
    assert asyncio.run(engine.generate([1, 2, 3], GREEDY)).tokens == first.tokens
    asyncio.run(engine.close())


def test_a_forgotten_engine_leaves_no_thread_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_IDLE_SECONDS", 0.01)
    engine = EmbeddedEngine(make())
    asyncio.run(engine.generate([1, 2, 3], GREEDY))
    thread = engine._thread._thread
    if thread is not None:
        thread.join(10)
    asyncio.run(engine.generate([1, 2, 3], GREEDY))
    thread = engine._thread._thread
    if thread is not None:
        thread.join(10)
    gone = weakref.ref(engine)
    del engine, thread
    gc.collect()
    assert gone() is None


def test_the_interpreter_ends_while_the_engine_works() -> None:
    script = (
        "import asyncio, torch; torch.set_num_threads(1)\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from ludus.core.generation import Sampling\n"
        "from ludus.engine import EmbeddedEngine\n"
        "model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16,\n"
        "    num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=100000))\n"
        "engine = EmbeddedEngine(model)\n"
        "async def main():\n"
        "    task = asyncio.create_task(engine.generate([1], Sampling(max_tokens=50000)))\n"
        "    while engine.stats.generated_tokens < 5: await asyncio.sleep(0.01)\n"
        "    raise SystemExit(7)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=55, capture_output=True, check=False)
    assert ended.returncode == 7, ended.stderr.decode()


async def test_forgetting_drops_what_was_cached_and_counts_no_update() -> None:
    model = make()
    engine = EmbeddedEngine(model, version=7)
    context, other = prompts([20, 20])
    first = await engine.generate(context, GREEDY, session="s")
    running = asyncio.create_task(engine.generate(other, LONG, session="r"))
    await until(lambda: engine.stats.generated_tokens > 10)
    await engine.forget()
    again = await engine.generate(context, GREEDY, session="s")
    assert (again.tokens, again.cached_tokens) == (first.tokens, 0)
    assert (await running).tokens == stock_greedy(model, other, 200)
    assert first.versions == again.versions == (VersionSpan(0, 7),)
    assert (engine.policy_version, await engine.update_weights()) == (7, 8)
    await engine.close()


async def test_a_pause_can_hand_the_caches_memory_back() -> None:
    model = make()
    engine = EmbeddedEngine(model, config=EngineConfig(release_memory="always"))
    context = prompts([20])[0]
    expected = stock_greedy(model, context, 200)
    running = asyncio.create_task(engine.generate(context, LONG, session="s"))
    await until(lambda: engine.stats.generated_tokens > 10)
    await engine.pause()
    assert engine.stats.memory_handed_back == 1
    assert not engine._core._kv_cache._layers  # type: ignore[attr-defined]
    assert not running.done()
    await engine.resume()
    assert (await running).tokens == expected
    await engine.close()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_running": 10**9}, "max_running"),
        ({"cache_tokens": 10**14}, "cache_tokens"),
        ({"block_size": 10**6}, "block_size"),
        ({"cache_tokens": 1000, "memory": 0.5}, "leave one out"),
    ],
)
def test_sizes_that_no_machine_has_are_refused_by_name(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EngineConfig(**settings)


def test_the_old_name_of_the_block_size_leads_to_the_new_one() -> None:
    from ludus.training import Recipe

    for config, raw in ((EngineConfig, {"page_size": 8}), (Recipe, {"engine": {"page_size": 8}})):
        with pytest.raises(
            ConfigError, match=r"page_size: unknown key; did you mean '(engine\.)?block_size'"
        ):
            config.parse(raw)


@pytest.mark.parametrize("waiting", [1, 1024])
async def test_the_queue_is_not_an_episodes_time(waiting: int) -> None:
    """In its queue, and before its door (`max_waiting`), while it is paused; then a few tokens."""
    engine = EmbeddedEngine(make(), config=EngineConfig(max_waiting=waiting))
    [context] = prompts([12])
    await engine.generate(context, GREEDY)
    await engine.pause()

    async def episode() -> int:
        async with time_limit(1.5):
            return len((await engine.generate(context, GREEDY)).tokens)

    running = [asyncio.create_task(episode()) for _ in range(3)]
    await asyncio.sleep(2.0)
    assert not any(one.done() for one in running)
    await engine.resume()
    assert await asyncio.gather(*running) == [6, 6, 6]
    await engine.close()


async def test_a_request_that_runs_is_an_episodes_time() -> None:
    """A pause after the first tokens is no queue: an engine that hangs there is found."""
    engine = EmbeddedEngine(make())
    [context] = prompts([12])

    async def episode() -> None:
        async with time_limit(1.0):
            await engine.generate(context, LONG)

    running = asyncio.create_task(episode())
    await until(lambda: engine.stats.generated_tokens > 2)
    await engine.pause()
    with pytest.raises(TimeoutError):
        await running
    await engine.resume()
    await engine.close()
