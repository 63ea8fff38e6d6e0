"""Callers of the engine's thread: how they wait on their event loops, and how they hear of their requests."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ludus.core.failures import EngineError
from ludus.core.generation import OnTokens
from ludus.remote.time_limit import Wait


class ReplyFuture:
    """A future on the caller's event loop, to be resolved from the engine's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def settle(self, outcome: object) -> None:
        """Set the result, or raise the exception in the caller. On its event loop only."""
        if self.future.done():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class TokenStream:
    """Tells a caller what was sampled for it so far, before its future is resolved."""

    def __init__(self, reply_future: ReplyFuture, tokens: list[int], on_tokens: OnTokens) -> None:
        """`tokens` are the request's own: a prompt now, which grows."""
        self.reply_future, self.loop = reply_future, reply_future.loop
        self._tokens, self._told, self._on_tokens = tokens, len(tokens), on_tokens

    def take(self) -> list[int]:
        """The tokens since the last time. On the engine's thread only."""
        new = self._tokens[self._told :]
        self._told += len(new)
        return new

    def settle(self, outcome: Any) -> None:
        """Hand tokens to the caller, if it is still there. On its event loop only."""
        if not self.reply_future.future.done():
            self._on_tokens(outcome)


Receiver = ReplyFuture | TokenStream


def _settle_all(loop: asyncio.AbstractEventLoop, outcomes: Sequence[tuple[Receiver, object]]) -> bool:
    """Settle futures of one loop, from any thread; False when that loop is closed and its callers are gone."""

    def settle() -> None:
        for receiver, outcome in outcomes:
            receiver.settle(outcome)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return False
    return True


class Outbox:
    """What callers are to hear after the current step. On the engine's thread, or under its lock."""

    def __init__(self) -> None:
        self.unresolved: set[ReplyFuture] = set()
        """The futures of callers that have no outcome yet."""
        self.streams: list[TokenStream] = []
        self._outcomes: list[tuple[Receiver, object]] = []

    def reply(self, reply_future: ReplyFuture, outcome: object) -> None:
        """Resolve a caller's future."""
        self.unresolved.discard(reply_future)
        self._outcomes.append((reply_future, outcome))

    def report_tokens(self) -> None:
        """What requests with a stream have sampled in this step, in order with the replies."""
        self.streams = [one for one in self.streams if one.reply_future in self.unresolved]
        self._outcomes += [(stream, new) for stream in self.streams if (new := stream.take())]

    def fail_all(self, error: EngineError) -> None:
        """Resolve every future with an error."""
        self._outcomes += [(reply_future, copy_of(error)) for reply_future in self.unresolved]
        self.unresolved.clear()
        self.deliver()

    def deliver(self) -> None:
        """One wake-up for each loop, however many of its callers are answered."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Receiver, object]]] = {}
        for receiver, outcome in self._outcomes:
            by_loop.setdefault(receiver.loop, []).append((receiver, outcome))
        self._outcomes.clear()
        for loop, outcomes in by_loop.items():
            _settle_all(loop, outcomes)


def copy_of(error: EngineError) -> EngineError:
    """An error for one more caller: each adds its own traceback."""
    copy = EngineError(str(error), retriable=error.retriable)
    copy.__cause__ = error.__cause__
    return copy


class _Waiter(ReplyFuture):
    """A caller in the queue; its future is done when it is admitted or cancelled."""

    def __init__(self, tag: str | None) -> None:
        super().__init__()
        self.tag, self.is_cancelled = tag, False

    def wake(self) -> bool:
        return _settle_all(self.loop, [(self, None)])


class AdmissionQueue:
    """Admits `capacity` callers, first come, first served, across threads and event loops.

    Each one that leaves, from any thread, admits the next.
    """

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self.free = capacity
        """How many callers could enter without waiting."""
        self._queue: deque[_Waiter] = deque()
        self._arriving: set[_Waiter] = set()  # queued, or admitted and not yet awake

    async def enter(self, tag: str | None = None) -> bool:
        """Wait to be admitted; False when `cancel` was called meanwhile."""
        with self._lock:
            if self.free > 0 and not self._queue:
                self.free -= 1
                return True
            waiter = _Waiter(tag)
            self._queue.append(waiter)
            self._arriving.add(waiter)
        entered = False
        try:
            await waiter.future
            entered = not waiter.is_cancelled
        finally:
            with self._lock:
                self._arriving.discard(waiter)
                is_queued = waiter in self._queue
                if is_queued:
                    self._queue.remove(waiter)
            if not entered and not is_queued:
                self.leave()  # it was given a place just now
        return entered

    def leave(self, wait: Wait | None = None, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Give a place back. A `wait` in an event loop ends with that."""
        with self._lock:
            while self._queue:
                if self._queue.popleft().wake():
                    break
            else:
                self.free += 1
        if wait is not None and loop is not None and wait.is_limited:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wait.leave)

    def cancel(self, tag: str | None = None) -> None:
        """Turn away the callers that wait under this tag, or all."""
        with self._lock:
            for waiter in self._arriving:
                if tag is None or waiter.tag == tag:
                    waiter.is_cancelled = True
                    waiter.wake()
