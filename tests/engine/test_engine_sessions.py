"""What is computed once and used again: turns, groups, forks."""

from __future__ import annotations

import asyncio

from engine_models import make, prompts, stock_greedy, until

from ludus.core import Sampling
from ludus.engine import EmbeddedEngine, EngineConfig

GREEDY = Sampling(max_tokens=7, temperature=0)


async def test_a_turn_computes_only_what_is_new() -> None:
    model = make()
    engine = EmbeddedEngine(model)
    context = prompts([21])[0]
    new = 21
    for observation in prompts([5, 9, 18], seed=2):
        before = engine.stats.computed_tokens
        completion = await engine.generate(context, GREEDY, session="s")
        assert completion.tokens == stock_greedy(model, context, 7)
        assert completion.cached_tokens == len(context) - new
        assert engine.stats.computed_tokens - before == new + 6
        context = context + completion.tokens + observation
        # The last token of an action is computed with the next turn: nothing needed it before.
        new = 1 + len(observation)
    await engine.close()


async def test_a_group_computes_its_prompt_once_even_when_it_arrives_together() -> None:
    model = make()
    engine = EmbeddedEngine(model, config=EngineConfig(block_size=4))
    prompt = prompts([23])[0]
    group = await asyncio.gather(*(engine.generate(prompt, GREEDY, session=f"{i}") for i in range(8)))
    assert {tuple(completion.tokens) for completion in group} == {tuple(stock_greedy(model, prompt, 7))}
    # 20 tokens are in full blocks; each other member computes the last 3 and its own 6.
    assert engine.stats.computed_tokens == 20 + 8 * (3 + 6)
    assert sorted(completion.cached_tokens for completion in group) == [0] + [20] * 7
    await engine.close()


async def test_another_context_keeps_the_longest_common_prefix() -> None:
    model = make()
    engine = EmbeddedEngine(model, config=EngineConfig(block_size=8))
    context = prompts([30])[0]
    first = await engine.generate(context, GREEDY, session="s")
    for length in (27, 19, 8, 3):
        other = context[:length] + prompts([6], seed=length)[0]
        completion = await engine.generate(other, GREEDY, session="s")
        assert completion.cached_tokens == length
        assert completion.tokens == stock_greedy(model, other, 7)
    # The blocks that the first context filled can still be found, and nobody has written into them.
    again = await engine.generate(context, GREEDY)
    assert again.tokens == first.tokens
    assert again.cached_tokens == 24
    same = await engine.generate(context, GREEDY, session="s")
    assert same.tokens == first.tokens
    await engine.close()


async def test_fork_shares_the_past_and_parts_ways() -> None:
    model = make()
    engine = EmbeddedEngine(model, config=EngineConfig(block_size=8))
    context = prompts([21])[0]
    start = await engine.generate(context, GREEDY, session="trunk")
    await engine.fork("trunk", "branch")
    base = context + start.tokens
    tails = prompts([4, 4], seed=5)
    left, right = await asyncio.gather(
        engine.generate(base + tails[0], GREEDY, session="trunk"),
        engine.generate(base + tails[1], GREEDY, session="branch"),
    )
    assert left.cached_tokens == right.cached_tokens == len(base) - 1
    assert left.tokens == stock_greedy(model, base + tails[0], 7)
    assert right.tokens == stock_greedy(model, base + tails[1], 7)
    await engine.fork("nobody", "somebody")
    await engine.fork("trunk", "trunk")
    await engine.close()


async def test_a_running_session_can_be_forked() -> None:
    model = make()
    engine = EmbeddedEngine(model, config=EngineConfig(block_size=8))
    context = prompts([21])[0]
    running = asyncio.create_task(
        engine.generate(context, Sampling(max_tokens=200, temperature=0), session="trunk")
    )
    await until(lambda: engine.stats.generated_tokens >= 10)
    await engine.fork("trunk", "branch")
    branch = await engine.generate(context, GREEDY, session="branch")
    assert branch.cached_tokens == 20
    assert (await running).tokens[:7] == branch.tokens == stock_greedy(model, context, 7)
    await engine.close()


async def test_a_released_session_is_forgotten() -> None:
    engine = EmbeddedEngine(make(), config=EngineConfig(block_size=64))
    context = prompts([21])[0]
    completion = await engine.generate(context, GREEDY, session="s")
    await engine.release("s")
    await engine.release("unknown")
    following = context + completion.tokens + [3]
    assert (await engine.generate(following, GREEDY, session="s")).cached_tokens == 0
    await engine.close()


async def test_the_same_request_alone_and_in_company() -> None:
    engine = EmbeddedEngine(make())
    context = prompts([13])[0]
    own = Sampling(max_tokens=20, temperature=0.9, seed=11)
    alone = await engine.generate(context, own)
    await engine.update_weights()
    others = [
        engine.generate(prompt, Sampling(max_tokens=15, seed=i, top_p=0.9 if i % 2 else 1.0))
        for i, prompt in enumerate(prompts([3, 40, 17, 9, 60]))
    ]
    crowd = await asyncio.gather(*others[:3], engine.generate(context, own), *others[3:])
    assert crowd[3].tokens == alone.tokens
    await engine.close()
