"""Deadlines that stand still while a server is paused: what it does not compute, it cannot be late with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Deadlines:
    """The deadlines of all requests in flight to one server."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Timeout, float] = {}
        """The seconds that each had left when they were stopped."""
        self._is_held = False

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """As `asyncio.timeout`."""
        async with asyncio.timeout(None if self._is_held else seconds) as deadline:
            self._left[deadline] = seconds
            try:
                yield deadline
            finally:
                del self._left[deadline]

    def hold(self) -> None:
        """Let all of them stand still; safe more than once."""
        if self._is_held:
            return
        self._is_held = True
        now = asyncio.get_running_loop().time()
        for deadline in self._left:
            when = deadline.when()
            if when is not None and not deadline.expired():
                self._left[deadline] = when - now
                deadline.reschedule(None)

    def go_on(self) -> None:
        """Let them run on."""
        if not self._is_held:
            return
        self._is_held = False
        now = asyncio.get_running_loop().time()
        for deadline, left in self._left.items():
            if not deadline.expired():
                deadline.reschedule(now + left)
