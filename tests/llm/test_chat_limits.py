"""Limits, budgets and the cache of models that are asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import Message
from ludus.core.generation import ChatOptions, ChatReply
from ludus.llm import (
    BudgetExceeded,
    CachedChatModel,
    ChatBudget,
    ChatError,
    ChatLimits,
    ChatUsage,
    LimitedChatModel,
    UnusableReply,
    ask_json,
    load_chat_model,
)
from ludus.llm.limits import RequestRate
from openai_server import chat, error, serving

HELLO = [Message("user", "hello")]
SHORT = ChatOptions(max_tokens=10)


class Echo:
    """Answers with the last message when its gate is open, and counts who is inside."""

    name = "echo"

    def __init__(self, *, is_open: bool = True) -> None:
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()
        self.entered = asyncio.Event()
        self.inside = self.most = self.asked = 0
        self.broken = False

    async def chat(self, messages: Sequence[Message], options: ChatOptions = SHORT) -> ChatReply:
        self.asked += 1
        self.entered.set()
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.gate.wait()
        finally:
            self.inside -= 1
        if self.broken:
            raise ChatError("down")
        return ChatReply(messages[-1].content, prompt_tokens=5, completion_tokens=3)

    async def close(self) -> None:
        pass


def damage(folder: Path) -> None:
    for file in folder.rglob("*.json"):
        os.truncate(file, 10)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_concurrency_is_bounded() -> None:
    inner = Echo(is_open=False)
    model = LimitedChatModel(inner, ChatLimits(concurrency=3))
    calls = [asyncio.create_task(model.chat(HELLO)) for _ in range(10)]
    await settled()
    assert inner.inside == 3
    calls[0].cancel()
    calls[9].cancel()
    inner.gate.set()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, ChatReply) for one in done) == 8
    assert inner.most == 3
    assert (model.usage.calls, model.usage.failed) == (9, 1)
    assert model.usage.tokens == 64


async def test_a_turn_that_never_comes_is_a_typed_failure() -> None:
    inner = Echo(is_open=False)
    model = LimitedChatModel(inner, ChatLimits(concurrency=1, wait_seconds=0.05))
    first = asyncio.create_task(model.chat(HELLO))
    await settled()
    with pytest.raises(ChatError, match="too tight"):
        await model.chat(HELLO)
    inner.gate.set()
    await first
    slow = LimitedChatModel(Echo(), ChatLimits(requests_per_minute=1, wait_seconds=0.05))
    await slow.chat(HELLO)
    with pytest.raises(ChatError, match="per minute"):
        await slow.chat(HELLO)
    assert slow.usage.calls == 1


@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), min_size=1, max_size=60),
)
def test_rates_hold_over_every_minute(limit: int, asked: list[tuple[float, int]]) -> None:
    now = 0.0
    rate = RequestRate(limit, lambda: now)
    used: list[tuple[float, int]] = []
    for pause, units in asked:
        now += pause
        now += rate.reserve(units)
        used.append((now, units))
    for start, _ in used:
        window = [units for at, units in used if start <= at < start + 60]
        # a minute's worth, the burst after a rest, and the request that was let in last
        assert sum(window) <= limit * (1 + 10 / 60) + max(window) + 1e-6


@given(st.integers(0, 5), st.integers(1, 8))
async def test_a_budget_of_calls_is_never_exceeded(budget: int, callers: int) -> None:
    inner = Echo()
    model = LimitedChatModel(inner, budget=ChatBudget(calls=budget))
    calls = [model.chat(HELLO, SHORT) for _ in range(callers)]
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert inner.asked == min(budget, callers)
    assert sum(isinstance(one, BudgetExceeded) for one in done) == max(0, callers - budget)


async def test_a_budget_counts_what_was_taken_and_waits_for_what_is_in_flight() -> None:
    # a call may take 12 tokens and takes 8: three fit into 28, though no three at the same time
    inner = Echo(is_open=False)
    model = LimitedChatModel(inner, budget=ChatBudget(tokens=28))
    calls = [asyncio.create_task(model.chat(HELLO, SHORT)) for _ in range(4)]
    await settled()
    inner.gate.set()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(one, BudgetExceeded) for one in done] == [False, False, False, True]
    assert "budget.tokens = 28" in str(done[3])
    assert model.usage.tokens == 24
    assert inner.most == 2


async def test_a_budget_of_money_needs_prices() -> None:
    prices = ChatBudget(money=0.001, prompt_price=20, completion_price=60)
    model = LimitedChatModel(Echo(), budget=prices)
    await model.chat(HELLO, SHORT)
    assert model.usage.money == pytest.approx((5 * 20 + 3 * 60) / 1e6)
    with pytest.raises(BudgetExceeded, match=r"budget\.money = 0\.001.*2 calls"):
        for _ in range(5):
            await model.chat(HELLO, SHORT)
    saved = model.usage.state_dict()
    again = ChatUsage()
    again.raise_to(saved)
    assert again == model.usage


async def test_a_failed_call_gives_its_reservation_back() -> None:
    inner = Echo()
    inner.broken = True
    model = LimitedChatModel(inner, budget=ChatBudget(tokens=12))
    with pytest.raises(ChatError, match="down"):
        await model.chat(HELLO, SHORT)
    inner.broken = False
    await model.chat(HELLO, SHORT)
    assert (model.usage.calls, model.usage.failed, model.usage.tokens) == (2, 1, 8)


async def test_the_same_request_has_the_same_answer(tmp_path: Path) -> None:
    answers = iter(range(100))
    with serving(lambda body: chat(str(next(answers)))) as server:
        table = {"address": f"{server.url}#tiny", "cache": str(tmp_path), "name": "judge"}
        one, other = load_chat_model(table), load_chat_model(table)
        assert (await one.chat(HELLO)).text == "0"
        again = await other.chat(HELLO)
        assert (again.text, again.is_cached) == ("0", True)
        assert (await one.chat(HELLO, ChatOptions(seed=1))).text == "1"
        assert (await one.chat([Message("user", "hello!")])).text == "2"
        assert (await load_chat_model(table | {"name": "other"}).chat(HELLO)).text == "3"
        damage(tmp_path)
        assert (await one.chat(HELLO)).text == "4"
        assert (await other.chat(HELLO)).text == "4"
        server.faults = [error(404)]
        with pytest.raises(ChatError):
            await one.chat([Message("user", "new")])
        assert (await one.chat([Message("user", "new")])).text == "5"
        for model in (one, other):
            await model.close()


async def test_equal_requests_at_once_are_one(tmp_path: Path) -> None:
    inner = Echo(is_open=False)
    model = CachedChatModel(LimitedChatModel(inner), tmp_path)
    calls = [asyncio.create_task(model.chat(HELLO)) for _ in range(5)]
    await inner.entered.wait()
    calls[0].cancel()  # the one that asked first: the others still want the answer
    await settled()
    inner.gate.set()
    done = await asyncio.gather(*calls[1:])
    assert {one.text for one in done} == {"hello"}
    assert inner.asked == 1
    assert model.usage.cached == 4
    assert all(one.is_cached for one in done)


async def test_a_request_that_nobody_waits_for_is_cancelled(tmp_path: Path) -> None:
    inner = Echo(is_open=False)
    model = CachedChatModel(inner, tmp_path)
    call = asyncio.create_task(model.chat(HELLO))
    await inner.entered.wait()
    call.cancel()
    await settled()
    assert inner.inside == 0
    inner.gate.set()
    assert (await model.chat(HELLO)).text == "hello"


async def test_answers_that_could_not_be_used_are_not_kept(tmp_path: Path) -> None:
    said = iter(["no JSON", "still none", "nor this", "nor that", '{"x": 1}'])
    with serving(lambda body: chat(next(said))) as server:
        table = {"address": f"{server.url}#tiny", "cache": str(tmp_path)}
        model = load_chat_model(table)
        with pytest.raises(UnusableReply):
            await ask_json(model, HELLO, dict[str, int], attempts=3)
        assert not [file for _, _, files in os.walk(tmp_path) for file in files]
        # one that was mended is kept with what it took, so that it is found again as it was
        found = await ask_json(model, HELLO, dict[str, int], attempts=2)
        again = await ask_json(model, HELLO, dict[str, int], attempts=2)
        await model.close()
    assert found.value == again.value == {"x": 1}
    assert len(again.replies) == 2 and not again.asked
