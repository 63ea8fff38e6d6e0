"""An engine without a model: replies from a script, and records every request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, Engine, FinishReason, OnTokens, Sampling, VersionSpan
from ludus.core.messages import MediaSpan
from ludus.core.random import uniforms
from ludus.core.tokenizer import Tokenizer
from ludus.engine.embedded.block_manager import common_prefix
from ludus.engine.embedded.request import first_ending

Reply = str | Sequence[int]
Script = Callable[[list[int], Sampling, str | None], Reply]


@dataclass(frozen=True, slots=True)
class FakeCall:
    """One request: the tokens that went in, and the completion that came out."""

    consumed: tuple[int, ...]
    sampling: Sampling
    session: str | None
    completion: Completion
    media: tuple[MediaSpan, ...] = ()


class FakeEngine(Engine):
    """An `Engine` for tests and for benchmarks of everything but the model.

    `script` is a function of (tokens, sampling, session), or the replies in order. A reply is token ids,
    taken as they are, or text, which `tokenizer` encodes and which ends with the first stop token unless
    a stop string or the length ends it before. Stops and lengths are honoured as a real engine does.
    Each request takes `seconds` (a number, or a function of the number of tokens produced), over which its
    tokens come one by one. `failures` names the requests, counted from 0, that raise instead.
    """

    def __init__(
        self,
        script: Script | Iterable[Reply],
        tokenizer: Tokenizer | None = None,
        *,
        seconds: float | Callable[[int], float] = 0.0,
        failures: Mapping[int, BaseException] | None = None,
    ) -> None:
        self._script = script if callable(script) else _in_order(iter(script))
        self._tokenizer = tokenizer
        self._seconds = seconds if callable(seconds) else lambda _: seconds
        self._failures = dict(failures or {})
        self._asked = 0
        self._version = 0
        self._resumed: asyncio.Event | None = None
        self._is_closed = False
        self._running: dict[str, asyncio.Event] = {}
        self.sessions: dict[str, list[int]] = {}
        """Tokens that each session would hold in its cache."""
        self.calls: list[FakeCall] = []
        """Every request that was answered, in the order of the answers."""
        self.in_flight = 0
        self.most_in_flight = 0

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def shares_weights(self) -> bool:
        return True

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        if self._is_closed:
            raise EngineError("the engine is closed", retriable=False)
        if session in self._running:
            raise EngineError(f"session {session!r} already has a request running", retriable=False)
        number, self._asked = self._asked, self._asked + 1
        if number in self._failures:
            raise self._failures[number]
        context, version = list(tokens), self._version
        produced, finish, stop = self._reply(context, sampling, session)
        told: list[int] = []
        if await self._elapse(produced, session, on_tokens, told):
            kept = max(len(produced) // 2, len(told))
            produced, finish, stop = produced[:kept], FinishReason.ABORTED, None
        if self._is_closed:
            raise EngineError("the engine is closed", retriable=False)
        held = self.sessions.get(session, []) if session is not None else []
        completion = Completion(
            tokens=produced,
            logprobs=(-uniforms(sampling.seed, np.arange(len(produced)))).tolist(),
            finish=finish,
            versions=(VersionSpan(0, version),),
            stop=stop,
            cached_tokens=min(common_prefix(context, held), len(context) - 1),
        )
        if session is not None:
            self.sessions[session] = context + produced
        self.calls.append(FakeCall(tuple(context), sampling, session, completion, tuple(media)))
        return completion

    def _reply(
        self, context: list[int], sampling: Sampling, session: str | None
    ) -> tuple[list[int], FinishReason, str | None]:
        """The scripted tokens up to the first thing that ends a generation."""
        reply = self._script(context, sampling, session)
        if isinstance(reply, str):
            if self._tokenizer is None:
                raise EngineError("a script that replies with text needs a tokenizer", retriable=False)
            reply = [*self._tokenizer.encode(reply), *sampling.stop_tokens[:1]]
        count, finish, stop = first_ending(
            reply, sampling, self._tokenizer.decode if self._tokenizer is not None else None
        )
        return list(reply[:count]), finish or FinishReason.LENGTH, stop

    async def _elapse(
        self, produced: list[int], session: str | None, on_tokens: OnTokens | None, told: list[int]
    ) -> bool:
        """Let the request's time pass, and any pause; whether it was aborted meanwhile.

        With `on_tokens` a token is reported after its share of the time, and added to `told`.
        """
        seconds = self._seconds(len(produced))
        early = produced[:-1] if on_tokens is not None else []
        aborted = asyncio.Event()
        if session is not None:
            self._running[session] = aborted
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for token in early:
                if await self._wait(seconds / len(produced), aborted):
                    break
                told.append(token)
                if on_tokens is not None:
                    on_tokens([token])
            await self._wait(seconds / (len(early) + 1), aborted)
        finally:
            self.in_flight -= 1
            if session is not None:
                del self._running[session]
        return aborted.is_set()

    async def _wait(self, seconds: float, aborted: asyncio.Event) -> bool:
        """Let time pass, and any pause; whether that was cut short."""
        try:
            async with asyncio.timeout(seconds):
                await aborted.wait()
        except TimeoutError:
            pass  # not aborted: its time is up, and the answer is ready
        if self._resumed is not None and not aborted.is_set():
            await self._resumed.wait()
        return aborted.is_set()

    async def score(self, tokens: Sequence[int], *, media: Sequence[MediaSpan] = ()) -> list[float]:
        return [0.0, *(-uniforms(0, np.asarray(tokens[1:], dtype=np.uint64))).tolist()]

    async def fork(self, session: str, into: str) -> None:
        if session in self.sessions:
            self.sessions[into] = list(self.sessions[session])

    async def release(self, session: str) -> None:
        self.sessions.pop(session, None)

    async def abort(self, session: str) -> None:
        if session in self._running:
            self._running[session].set()

    async def pause(self) -> None:
        if self._resumed is None:
            self._resumed = asyncio.Event()

    async def resume(self) -> None:
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None

    async def update_weights(self, count: int = 1) -> int:
        self._version += count
        self.sessions.clear()
        return self._version

    async def close(self) -> None:
        self._is_closed = True
        await self.resume()


def _in_order(replies: Iterator[Reply]) -> Script:
    def script(tokens: list[int], sampling: Sampling, session: str | None) -> Reply:
        try:
            return next(replies)
        except StopIteration:
            raise EngineError("the script has no further reply", retriable=False) from None

    return script
