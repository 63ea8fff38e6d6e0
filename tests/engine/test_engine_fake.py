"""The stand-in behaves like an engine, and remembers."""

from __future__ import annotations

import asyncio

import pytest

from ludus.core import ByteTokenizer, Engine, EngineError, FinishReason, Sampling
from ludus.engine import FakeEngine

TOKENIZER = ByteTokenizer()
END = TOKENIZER.stop_tokens


async def test_replies_in_order_with_stops_and_lengths() -> None:
    engine = FakeEngine(["ab", "x</call>y", "longer", [1, 2, 3]], TOKENIZER)
    assert isinstance(engine, Engine)
    first = await engine.generate([9], Sampling(stop_tokens=END))
    assert (first.tokens, first.finish) == ([97, 98, *END], FinishReason.STOP_TOKEN)
    second = await engine.generate([9], Sampling(stop=("</call>",), stop_tokens=END))
    assert (TOKENIZER.decode(second.tokens), second.stop) == ("x</call>", "</call>")
    third = await engine.generate([9], Sampling(max_tokens=3))
    assert (TOKENIZER.decode(third.tokens), third.finish) == ("lon", FinishReason.LENGTH)
    fourth = await engine.generate([9], Sampling())
    assert fourth.tokens == [1, 2, 3]
    assert [call.completion for call in engine.calls] == [first, second, third, fourth]
    with pytest.raises(EngineError, match="no further reply"):
        await engine.generate([9], Sampling())


async def test_a_function_sees_what_the_engine_consumes() -> None:
    engine = FakeEngine(lambda tokens, sampling, session: [len(tokens), sampling.seed])
    context = [5, 6]
    for turn in range(3):
        completion = await engine.generate(context, Sampling(seed=turn), session="s")
        assert completion.tokens == [len(context), turn]
        assert completion.cached_tokens == (0 if turn == 0 else len(context) - 1)
        assert len(completion.logprobs) == 2
        context += [*completion.tokens, 7]
    assert [call.consumed[:2] for call in engine.calls] == [(5, 6)] * 3
    await engine.fork("s", "t")
    assert engine.sessions["t"] == engine.sessions["s"]
    assert await engine.update_weights() == 1
    assert not engine.sessions


async def test_failures_aborts_and_pauses() -> None:
    engine = FakeEngine(lambda *_: [1, 2, 3, 4], seconds=30, failures={0: EngineError("down")})
    with pytest.raises(EngineError, match="down"):
        await engine.generate([9], Sampling())
    task = asyncio.create_task(engine.generate([9], Sampling(), session="s"))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="already"):
        await engine.generate([9], Sampling(), session="s")
    await engine.abort("s")
    assert ((await task).tokens, (await task).finish) == ([1, 2], FinishReason.ABORTED)

    quick = FakeEngine(lambda *_: [1])
    await quick.pause()
    waiting = asyncio.create_task(quick.generate([9], Sampling()))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await quick.resume()
    assert (await waiting).tokens == [1]
    await quick.close()
    with pytest.raises(EngineError, match="closed"):
        await quick.generate([9], Sampling())
    assert quick.most_in_flight == 1


async def test_requests_overlap() -> None:
    engine = FakeEngine(lambda *_: [1], seconds=lambda produced: 0.01 * produced)
    await asyncio.gather(*(engine.generate([9], Sampling()) for _ in range(5)))
    assert engine.most_in_flight == 5
    assert len(await engine.score([1, 2, 3])) == 3
