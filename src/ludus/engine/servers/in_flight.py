"""The requests that are in flight to a server: found by an abort, and their deadlines held by a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from ludus.core.failures import EngineError

T = TypeVar("T")


class RequestsInFlight(Generic[T]):
    """The requests of each session, each a task with an id, until the engine is closed."""

    def __init__(self) -> None:
        self._tasks: dict[str | None, dict[str, asyncio.Task[T]]] = {}
        self._is_closed = False

    async def answer(self, session: str | None, request: str, call: Coroutine[Any, Any, T]) -> T | None:
        """The answer to a request; None where it was cancelled here (`of`). The caller's own cancellation
        ends it, and is waited for."""
        task = asyncio.ensure_future(call)
        self._tasks.setdefault(session, {})[request] = task
        try:
            await asyncio.wait([task])
        finally:
            del self._tasks[session][request]
            if not self._tasks[session]:
                del self._tasks[session]
            if not task.done():  # the caller was cancelled
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            self.check_open()
            return None
        return task.result()

    def of(self, session: str) -> dict[str, asyncio.Task[T]]:
        """A session's requests, by their ids."""
        return dict(self._tasks.get(session, {}))

    def check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed", retriable=False)

    def open(self) -> None:
        """Take requests, again after `close`."""
        self._is_closed = False

    def close(self) -> None:
        """Cancel all of them, and refuse others."""
        self._is_closed = True
        for task in [task for tasks in self._tasks.values() for task in tasks.values()]:
            task.cancel()


class Deadlines:
    """The deadlines of all requests to one server. They stand still while it is paused."""

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
