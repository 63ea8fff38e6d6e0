"""Where a reward runs code, for how long, and what to do when we lose the sandbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ludus.core.failures import Boundary, InfraError
from ludus.rewards.guard import guarded
from ludus.sandbox import Execution, Sandbox, SandboxConfig, SessionLost, shared_sandbox

T = TypeVar("T")

_MARGIN_SECONDS = 1.0
"""What ending an execution may take after its time: no reason to say that there was no room."""
_pairs: WeakKeyDictionary[Sandbox, asyncio.Semaphore] = WeakKeyDictionary()


async def judged(name: str, call: Callable[[], Awaitable[T]]) -> T:
    """What judging gives. A sandbox that failed is tried once more; a task that is broken is not."""

    async def checked() -> T:
        try:
            return await call()
        except ValueError as error:
            raise InfraError(
                Boundary.REWARD, f"the reward {name!r} failed: {error}", retriable=False
            ) from error

    return await guarded(name, checked, retries=1)


class Clock:
    """How long judging one answer may still take.

    Waiting until there is room in the sandbox is ours: it does not count, and has as many seconds of its own,
    after which it is an `InfraError`, never a failed test.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._patience = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def expired(self) -> bool:
        return time.monotonic() > self._deadline

    async def waiting(self, awaited: Awaitable[T]) -> T:
        """What comes of waiting for a place."""
        return await self._bounded(awaited, lambda _: 0.0, 0.0)

    async def running(self, running: Awaitable[Execution], longest: float) -> Execution:
        """An execution that may have to wait for a place before its at most `longest` seconds."""
        return await self._bounded(
            running, lambda execution: execution.seconds, longest + _MARGIN_SECONDS
        )

    async def _bounded(self, awaited: Awaitable[T], busy: Callable[[T], float], longest: float) -> T:
        started = time.monotonic()
        try:
            async with asyncio.timeout(max(self._patience, 0.0) + longest) as bound:
                found = await awaited
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise InfraError(
                Boundary.SANDBOX,
                f"the sandbox had no room within {self._seconds:g} seconds; raise its max_sessions or "
                "total_seconds, or score fewer answers at once",
            ) from error
        waited = max(0.0, time.monotonic() - started - busy(found))
        self._patience -= waited
        self._deadline += waited
        return found


@asynccontextmanager
async def room_for_two(sandbox: Sandbox, clock: Clock) -> AsyncIterator[None]:
    """Room for a judging that holds one session while it waits for another.

    So many at once that all of them find their second one: otherwise each could hold one and wait for ever.
    """
    if sandbox not in _pairs:
        _pairs[sandbox] = asyncio.Semaphore(max(1, sandbox.config.max_sessions // 2))
    pairs = _pairs[sandbox]
    await clock.waiting(pairs.acquire())
    try:
        yield
    finally:
        pairs.release()


class Place:
    """A sandbox by its settings. Judging keeps no state, so a session that we lost is worth another try."""

    def __init__(self, config: SandboxConfig | Mapping[str, Any] | None, name: str) -> None:
        if isinstance(config, Mapping):
            config = SandboxConfig.parse(config, f"the sandbox of {name!r}")
        self.config = config or SandboxConfig()

    def reading(self, paths: tuple[str, ...]) -> SandboxConfig:
        """The settings of a sandbox that can also read these files."""
        readable = tuple(dict.fromkeys([*self.config.readable, *paths]))
        return self.config.model_copy(update={"readable": readable})

    async def use(
        self, work: Callable[[Sandbox], Awaitable[T]], config: SandboxConfig | None = None
    ) -> T:
        """What `work` gives with the sandbox; a failure of the sandbox is an `InfraError`, to be retried."""
        try:
            sandbox = shared_sandbox(config or self.config)
            await sandbox.start()
            return await work(sandbox)
        except SessionLost as error:
            raise InfraError(Boundary.SANDBOX, str(error)) from error
