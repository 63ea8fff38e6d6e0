"""Limits of episodes: a time limit that leaves queues out, places in flight, and the gate before the engine.

Code that makes an episode wait for a place (a pool, the engine, a tool's limit, a server's queue) says so::

    async with time_limit(600) as deadline:     # around the episode
        ...
    with queueing():                            # around the wait, wherever it is
        await a_place()
    with recorded_wait() as queued:             # around what tells afterwards how long it waited
        reply = await ask()
        queued(reply.queued_seconds)

The limit is found through the context, so a wait in a task that the episode has started counts as well. While
one call of a turn waits and others run, the limit stands still; when all are done, what they ran is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Literal, TypeVar


class TimeLimit:
    """The limit of one episode, in its event loop."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self._deadline = deadline
        self._waits = 0
        self._since, self._left = 0.0, 0.0
        self._waited = 0.0

    @property
    def waited(self) -> float:
        """The seconds that were left out until now."""
        return self._waited + (_now() - self._since if self._waits else 0.0)

    def enter(self) -> None:
        """A wait begins."""
        if not self._waits:
            self._since = _now()
            self._left = (self._deadline.when() or self._since) - self._since
            self._move(None)
        self._waits += 1

    def leave(self) -> None:
        """A wait ends."""
        self._waits -= 1
        if not self._waits:
            self._waited += _now() - self._since
            self._move(_now() + self._left)

    def settle(self, before: float, waited: float) -> None:
        """Since `waited` was `before`, so many seconds were in queues, as is known now."""
        seconds = waited - (self.waited - before)
        self._waited += seconds
        self._left += seconds
        when = self._deadline.when()
        if when is not None:
            self._move(when + seconds)

    def _move(self, when: float | None) -> None:
        with suppress(RuntimeError):  # the episode is over, and a call of it outlives it
            self._deadline.reschedule(when)


class Wait:
    """One wait, which may end before its `with` does. Without an episode it limits nothing."""

    def __init__(self, limit: TimeLimit | None) -> None:
        self._limit, self._is_over = limit, limit is None
        self.is_limited = limit is not None
        if limit is not None:
            limit.enter()

    def leave(self) -> None:
        """The wait is over; in the event loop of the episode."""
        if not self._is_over and self._limit is not None:
            self._is_over = True
            self._limit.leave()


_current: ContextVar[TimeLimit | None] = ContextVar("time_limit", default=None)


def current_limit() -> TimeLimit | None:
    """The limit of the episode that this code runs for."""
    return _current.get()


@contextmanager
def under_limit(limit: TimeLimit | None) -> Iterator[None]:
    """Run for the episode that has this limit: in a task that it did not start."""
    token = _current.set(limit)
    try:
        yield
    finally:
        _current.reset(token)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """At most `seconds`, queues left out; raises what `asyncio.timeout` does."""
    async with asyncio.timeout(seconds) as deadline:
        with under_limit(TimeLimit(deadline)):
            yield deadline


@contextmanager
def queueing() -> Iterator[Wait]:
    """Mark a wait in a Ludus queue: the episode's time limit stands still."""
    wait = Wait(_current.get())
    try:
        yield wait
    finally:
        wait.leave()


@contextmanager
def recorded_wait() -> Iterator[Callable[[float], None]]:
    """Something whose wait is known when it is done: call what is yielded with the seconds in queues."""
    limit = _current.get()
    before = limit.waited if limit is not None else 0.0
    yield lambda waited: limit.settle(before, waited) if limit is not None else None


def _now() -> float:
    return asyncio.get_running_loop().time()


T = TypeVar("T")


class SamplingGate:
    """Lets requests of many episodes through to the engine, or holds them back; counts those at the engine."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.sampling: Counter[str] = Counter()
        """Requests at the engine, by session."""

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        """Wait until it is open; an episode's time limit stands still."""
        if not self._open.is_set():
            with queueing():
                await self._open.wait()

    @contextmanager
    def noted(self, session: str) -> Iterator[None]:
        """Count a request of this session while it is at the engine."""
        self.sampling[session] += 1
        try:
            yield
        finally:
            self.sampling[session] -= 1
            if not self.sampling[session]:
                del self.sampling[session]


class EpisodePlaces(asyncio.Semaphore):
    """Places for episodes in flight, which can be closed: what comes then waits."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._taken = 0

    async def acquire(self) -> Literal[True]:
        await super().acquire()
        try:
            while not self._open.is_set():
                await self._open.wait()
        except BaseException:
            super().release()
            raise
        self._taken += 1
        self._idle.clear()
        return True

    def release(self) -> None:
        self._taken -= 1
        if not self._taken:
            self._idle.set()
        super().release()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def empty(self) -> None:
        """Wait until no episode has a place."""
        await self._idle.wait()


class GroupPlaces:
    """The places as the attempts of one group take them, and how many attempts have not ended."""

    def __init__(self, places: EpisodePlaces, attempts: int) -> None:
        self._places, self.left, self.taken = places, attempts, 0

    async def __aenter__(self) -> None:
        await self._places.acquire()
        self.taken += 1

    async def __aexit__(self, *_: object) -> None:
        self._places.release()
        self.left -= 1
        self.taken -= 1


async def run_all(running: Sequence[Awaitable[T]]) -> list[T]:
    """The results of all; when one fails, or the caller is cancelled, the others are stopped first."""
    pending = [asyncio.ensure_future(one) for one in running]
    try:
        # A task even for a single one: it may turn a cancellation into a result, its caller must not.
        return list(await asyncio.gather(*pending))
    finally:
        if not all(task.done() for task in pending):
            await stop_all(pending)


async def stop_all(running: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs, and wait until it has released its resources."""
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
