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
    admitted: asyncio.Future[bool]


class Turnstile:
    """Lets `capacity` visitors in; each one that leaves, from any thread, makes room for the next."""

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._free = capacity
        self._visitors: deque[_Visitor] = deque()

    @property
    def free(self) -> int:
        """How many could enter without waiting."""
        return self._free

    async def enter(self, tag: str | None = None) -> bool:
        """Wait for a place; False when turned away by `expel`."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free > 0 and not self._visitors:
                self._free -= 1
                return True
            visitor = _Visitor(tag, loop, loop.create_future())
            self._visitors.append(visitor)
        try:
            return await visitor.admitted
        except asyncio.CancelledError:
            self._withdraw(visitor)
            raise

    def leave(self) -> None:
        """Give a place back."""
        with self._lock:
            while self._visitors:
                if _tell(self._visitors.popleft(), True):
                    return
            self._free += 1

    def expel(self, tag: str | None = None) -> int:
        """Turn away those who wait under this tag, or everybody; how many there were."""
        with self._lock:
            leaving = [v for v in self._visitors if tag is None or v.tag == tag]
            self._visitors = deque(v for v in self._visitors if v not in leaving)
        for visitor in leaving:
            _tell(visitor, False)
        return len(leaving)

    def _withdraw(self, visitor: _Visitor) -> None:
        """A cancelled visitor gives up its place in the line, or the place it was just given."""
        with self._lock:
            if visitor in self._visitors:
                self._visitors.remove(visitor)
                return
        self.leave()


def _tell(visitor: _Visitor, admitted: bool) -> bool:
    try:
        visitor.loop.call_soon_threadsafe(_settle, visitor.admitted, admitted)
    except RuntimeError:  # its loop is closed: nobody is waiting any more
        return False
    return True


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
