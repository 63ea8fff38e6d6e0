"""The bounded door in front of the queue: first come, first served, across threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Visitor:
    tag: str | None
    loop: asyncio.AbstractEventLoop
    admitted: asyncio.Future[None]
    is_expelled: bool = False


class Turnstile:
    """Lets `capacity` visitors in; each one that leaves, from any thread, makes room for the next."""

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._free = capacity
        self._line: deque[_Visitor] = deque()
        self._arriving: set[_Visitor] = set()  # in line, or let in and not yet aware of it

    @property
    def free(self) -> int:
        """How many could enter without waiting."""
        return self._free

    async def enter(self, tag: str | None = None) -> bool:
        """Wait for a place; False when turned away by `expel`."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free > 0 and not self._line:
                self._free -= 1
                return True
            visitor = _Visitor(tag, loop, loop.create_future())
            self._line.append(visitor)
            self._arriving.add(visitor)
        entered = False
        try:
            await visitor.admitted
            entered = not visitor.is_expelled
        finally:
            if not entered:
                self._withdraw(visitor)
            with self._lock:
                self._arriving.discard(visitor)
        return entered

    def leave(self) -> None:
        """Give a place back."""
        with self._lock:
            while self._line:
                if _tell(self._line.popleft()):
                    return
            self._free += 1

    def expel(self, tag: str | None = None) -> None:
        """Turn away those who wait under this tag, or everybody."""
        with self._lock:
            for visitor in self._arriving:
                if tag is None or visitor.tag == tag:
                    visitor.is_expelled = True
                    _tell(visitor)

    def _withdraw(self, visitor: _Visitor) -> None:
        """Give up the place in the line, or the place that was just given."""
        with self._lock:
            if visitor in self._line:
                self._line.remove(visitor)
                return
        self.leave()


def _tell(visitor: _Visitor) -> bool:
    try:
        visitor.loop.call_soon_threadsafe(_settle, visitor.admitted)
    except RuntimeError:  # its loop is closed: nobody is waiting any more
        return False
    return True


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
