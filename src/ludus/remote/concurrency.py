"""Limits on episodes in flight, the gate before the engine, and running several coroutines together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from ludus.remote.time_limit import queueing

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
