"""A first-in-first-out limit on calls in flight that belongs to no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Limiter:
    """At most `limit` holders at a time, over all event loops and threads; None means no limit."""

    def __init__(self, limit: int | None) -> None:
        self._lock = threading.Lock()
        self._free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        if self._free is None:
            yield
            return
        await self._take()
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self) -> None:
        assert self._free is not None
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                granted = turn not in self._waiting
                if not granted:
                    self._waiting.remove(turn)
            if granted:
                self._pass_on()  # the slot was given to us while we were being cancelled
            raise

    def _pass_on(self) -> None:
        assert self._free is not None
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_grant, turn)
                except RuntimeError:
                    continue  # its event loop is closed: nobody waits there any more
                return
            self._free += 1


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
