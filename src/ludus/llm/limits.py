"""Limits of asking a model: requests at once and per minute, tokens per minute, and a budget.

Who waits for whom: a call waits for a place among those in flight, for its turn by the rates, and, where the
budget could run out with what is in flight, for one of these to end. These waits have one deadline
(`wait_seconds`), and the request itself has its own. Locks belong to an event loop; what was spent does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import Field, TypeAdapter

from ludus.core.config import Config
from ludus.core.generation import ChatModel, ChatOptions, ChatReply
from ludus.core.messages import Message
from ludus.core.strict_json import decode
from ludus.llm.remote import ChatError
from ludus.remote.client import PerLoop
from ludus.remote.threads import run_sync

_BURST_SECONDS = 10.0
_CHARS_PER_TOKEN = 3
_IMAGE_TOKENS = 1500


class BudgetExceeded(ChatError):
    """A call was not made, because the budget for it has been spent."""


@dataclass(slots=True)
class ChatUsage:
    """Count and cost of requests."""

    calls: int = 0
    failed: int = 0
    cached: int = 0
    """Answers that were found in the cache, or shared with an equal request in flight."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0
    """By the prices that were given; 0 without any."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def summary(self) -> str:
        """One line for people."""
        money = f", {self.money:.4g} spent" if self.money else ""
        return (
            f"{self.calls:,} calls ({self.failed:,} failed, {self.cached:,} more from the cache), "
            f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens{money}"
        )

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def raise_to(self, state: Mapping[str, Any]) -> None:
        """At least what a saved state says was spent."""
        for name, now in asdict(self).items():
            setattr(self, name, max(now, type(now)(state.get(name, 0))))


@runtime_checkable
class CountsUsage(Protocol):
    """A model that counts what it is asked."""

    usage: ChatUsage


class ChatBudget(Config):
    """The most that may be spent on a model in a run; prices are per million tokens."""

    calls: int | None = Field(default=None, ge=0)
    """Most requests, those that are sent again not counted."""
    tokens: int | None = Field(default=None, ge=0)
    """Most tokens, of questions and answers together."""
    money: float | None = Field(default=None, ge=0)
    """Most money, in the currency of the prices."""
    prompt_price: float = Field(default=0.0, ge=0)
    """Price of a million tokens of questions."""
    completion_price: float = Field(default=0.0, ge=0)
    """Price of a million tokens of answers."""

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        spent = prompt_tokens * self.prompt_price + completion_tokens * self.completion_price
        return spent / 1e6


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """How much may be asked at once, and by when."""

    concurrency: int = 32
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    wait_seconds: float = 600.0


class RequestRate:
    """So many units a minute: what is due is waited for, with a burst of ten seconds' worth after a rest.

    A request begins as soon as earlier ones are paid for, and adds what it takes itself (GCRA).
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = 0.0 if per_minute is None else 60.0 / per_minute
        self._clock = clock
        self._due = -math.inf

    def reserve(self, units: float) -> float:
        """Seconds to wait before these units may be used."""
        now = self._clock()
        wait = max(0.0, self._due - now)
        self._due = max(self._due, now - _BURST_SECONDS) + units * self._seconds
        return wait

    def correct(self, units: float) -> None:
        """These were used beyond what was reserved; fewer if negative."""
        self._due += units * self._seconds


class _Waiting:
    """One event loop's part: who is in flight, and what they may still spend."""

    def __init__(self, concurrency: int) -> None:
        self.slots = asyncio.Semaphore(concurrency)
        self.changed = asyncio.Condition()

    async def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True)
class _Estimate:
    prompt: int
    completion: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


class LimitedChatModel:
    """A model within limits and a budget. `usage` counts what was spent."""

    def __init__(
        self, inner: ChatModel, limits: ChatLimits | None = None, budget: ChatBudget | None = None
    ) -> None:
        self.inner, self.limits, self.budget = inner, limits or ChatLimits(), budget or ChatBudget()
        self.usage = ChatUsage()
        self._reserved: list[_Estimate] = []
        self._requests = RequestRate(self.limits.requests_per_minute)
        self._tokens = RequestRate(self.limits.tokens_per_minute)
        self._waiting = PerLoop(lambda: _Waiting(self.limits.concurrency))

    @property
    def name(self) -> str:
        return self.inner.name

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        chars = sum(len(message.content) for message in messages)
        images = sum(len(message.media) for message in messages)
        prompt = 1 + chars // _CHARS_PER_TOKEN + _IMAGE_TOKENS * images  # servers count after the fact
        estimate = _Estimate(prompt, options.max_tokens)
        waiting = await self._waiting.get()
        async with self._turn(waiting, estimate):
            reply: ChatReply | None = None
            try:
                reply = await self.inner.chat(messages, options)
                cost = self.budget.cost(reply.prompt_tokens, reply.completion_tokens)
                reply = replace(reply, money=cost)
                return reply
            finally:
                self._count(estimate, reply)

    async def close(self) -> None:
        await self._waiting.close()
        await self.inner.close()

    @asynccontextmanager
    async def _turn(self, waiting: _Waiting, estimate: _Estimate) -> AsyncIterator[None]:
        """Wait for a place, for what the budget has left and for the rates; give back what was taken."""
        async with AsyncExitStack() as taken:
            try:
                async with asyncio.timeout(self.limits.wait_seconds) as deadline:
                    await taken.enter_async_context(waiting.slots)
                    await self._reserve(waiting, estimate)
                    taken.push_async_callback(self._release, waiting, estimate)
                    rates = self._requests.reserve(1), self._tokens.reserve(estimate.tokens)
                    await asyncio.sleep(max(rates))
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise ChatError(
                    f"no turn to ask {self.name} within {self.limits.wait_seconds:g} seconds: its limits "
                    "(concurrency, requests and tokens per minute) are too tight for what is asked"
                ) from error
            yield

    async def _release(self, waiting: _Waiting, estimate: _Estimate) -> None:
        self._reserved.remove(estimate)
        async with waiting.changed:
            waiting.changed.notify_all()

    async def _reserve(self, waiting: _Waiting, estimate: _Estimate) -> None:
        """Take what the call may need; waits only where calls in flight may give some of theirs back."""
        async with waiting.changed:
            while (over := self._over_budget(self._reserved, estimate)) is not None:
                if not self._reserved or self._over_budget([], estimate) is not None:
                    raise BudgetExceeded(
                        f"the budget for {self.name} is spent: {over} (so far {self.usage.summary()})"
                    )
                await waiting.changed.wait()
            self._reserved.append(estimate)

    def _over_budget(self, in_flight: Sequence[_Estimate], estimate: _Estimate) -> str | None:
        """Which bound one more call could exceed."""
        budget, usage, calls = self.budget, self.usage, [*in_flight, estimate]
        tokens = usage.tokens + sum(call.tokens for call in calls)
        money = usage.money + sum(budget.cost(call.prompt, call.completion) for call in calls)
        if budget.calls is not None and usage.calls + len(calls) > budget.calls:
            return f"budget.calls = {budget.calls}"
        if budget.tokens is not None and tokens > budget.tokens:
            return f"budget.tokens = {budget.tokens}, and a call may take {estimate.tokens}"
        if budget.money is not None and money > budget.money:
            most = budget.cost(estimate.prompt, estimate.completion)
            return f"budget.money = {budget.money:g}, and a call may take {most:.4g}"
        return None

    def _count(self, estimate: _Estimate, reply: ChatReply | None) -> None:
        self.usage.calls += 1
        if reply is None:
            self.usage.failed += 1
            return
        self._tokens.correct(reply.prompt_tokens + reply.completion_tokens - estimate.tokens)
        self.usage.prompt_tokens += reply.prompt_tokens
        self.usage.completion_tokens += reply.completion_tokens
        self.usage.money += reply.money


_REPLY = TypeAdapter(ChatReply)


def request_key(name: str, messages: Sequence[Message], options: ChatOptions) -> str:
    """Cache key of a request."""
    said = [
        {**message.as_chat(), "media": [[item.kind, item.sha256] for item in message.media]}
        for message in messages
    ]
    text = json.dumps([1, name, said, asdict(options)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


class ReplyFolder:
    """Answers by key, as files. What cannot be read is no answer; what cannot be written is left out."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def read(self, key: str) -> ChatReply | None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            return decode(_REPLY, json.loads(self._file(key).read_bytes()))
        return None

    def write(self, key: str, reply: ChatReply) -> None:
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{key}.{secrets.token_hex(4)}")
        try:
            part.write_text(json.dumps(asdict(reply)), encoding="utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def remove(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._file(key).unlink()

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


@dataclass(slots=True)
class _Shared:
    task: asyncio.Task[ChatReply]
    callers: int = 0


class CachedChatModel:
    """A model whose answers are kept in a folder; equal requests at the same time are one request."""

    def __init__(self, inner: ChatModel, folder: str | Path) -> None:
        self.inner, self._store = inner, ReplyFolder(folder)
        self.usage = inner.usage if isinstance(inner, CountsUsage) else ChatUsage()
        self._shared: dict[tuple[int, str], _Shared] = {}

    @property
    def name(self) -> str:
        return self.inner.name

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        key = request_key(self.name, messages, options)
        place = (id(asyncio.get_running_loop()), key)
        shared = self._shared.get(place)
        joins = shared is not None
        if shared is None:
            shared = _Shared(asyncio.create_task(self._find_or_ask(key, messages, options)))
            self._shared[place] = shared
            shared.task.add_done_callback(lambda _: self._shared.pop(place, None))
        shared.callers += 1
        try:
            reply = await asyncio.shield(shared.task)
        finally:
            shared.callers -= 1
            if shared.callers == 0 and not shared.task.done():  # no caller waits for it any more
                shared.task.cancel()
                self._shared.pop(place, None)
        if joins or reply.is_cached:
            self.usage.cached += 1
            reply = replace(reply, is_cached=True)
        return reply

    async def forget(self, messages: Sequence[Message], options: ChatOptions) -> None:
        """Ask again the next time."""
        await run_sync(self._store.remove, request_key(self.name, messages, options))

    async def close(self) -> None:
        await self.inner.close()

    async def _find_or_ask(
        self, key: str, messages: Sequence[Message], options: ChatOptions
    ) -> ChatReply:
        found = await run_sync(self._store.read, key)
        if found is not None:
            return replace(found, is_cached=True)
        reply = await self.inner.chat(messages, options)
        with contextlib.suppress(OSError):  # a full disk loses answers, not the run
            await run_sync(self._store.write, key, reply)
        return reply
