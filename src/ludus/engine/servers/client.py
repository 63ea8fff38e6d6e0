"""What engines over a server share: the requests in flight, and their deadlines, which a pause holds."""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ludus.core.failures import EngineError
from ludus.core.generation import (
    Completion,
    Engine,
    FinishReason,
    OnTokens,
    Sampling,
    VersionSpan,
)
from ludus.core.images import not_shown
from ludus.core.messages import MediaSpan


class ServerEngine(Engine):
    """An engine that asks a server: each request is a task with an id, found by its session until `close`."""

    def __init__(self) -> None:
        self._tasks: dict[str | None, dict[str, asyncio.Task[Completion]]] = {}
        self._is_closed = False

    @property
    def takes_images(self) -> bool:
        return False

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        self._check(media)
        request = uuid.uuid4().hex
        task = asyncio.ensure_future(self._complete(tokens, sampling, request, session))
        self._tasks.setdefault(session, {})[request] = task
        try:
            await asyncio.wait([task])
        finally:
            del self._tasks[session][request]
            if not self._tasks[session]:
                del self._tasks[session]
            if not task.done():  # the caller was cancelled, which ends the request, and is waited for
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            self._check()
            return Completion([], [], FinishReason.ABORTED, (VersionSpan(0, self.policy_version),))
        return task.result()

    @abstractmethod
    async def _complete(
        self, tokens: Sequence[int], sampling: Sampling, request: str, session: str | None
    ) -> Completion:
        """The completion of a request with this id; a cancellation ends it on the server."""

    def _check(self, media: Sequence[MediaSpan] = ()) -> None:
        """Refuse requests after `close`, and those with images."""
        if self._is_closed:
            raise EngineError("the engine is closed", retriable=False)
        if media:
            raise not_shown(self.name)

    async def abort(self, session: str) -> None:
        for task in list(self._tasks.get(session, {}).values()):
            task.cancel()

    async def close(self) -> None:
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
