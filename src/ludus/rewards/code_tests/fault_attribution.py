"""Where a reward runs code, for how long, and whose doing it is when judging breaks.

Everything that an answer can bring about is the answer's doing and scores 0: otherwise a policy could learn
to leave its wrong answers unscored. That judging broke is ours only where the host can prove it: an answer
that does nothing, judged on the same task right after it, breaks it as well. This control runs every time:
a machine that was healthy a moment ago proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ludus.core.failures import Aborted, Boundary, ConfigError, InfraError, MissingExtraError
from ludus.rewards.reward import Parts, with_retries
from ludus.sandbox import Execution, Sandbox, SandboxConfig, SessionLost, shared_sandbox

T = TypeVar("T")
SandboxFactory = Callable[[SandboxConfig], Sandbox]
"""The sandbox for some settings."""

_log = logging.getLogger(__name__)

_MARGIN_SECONDS = 1.0
"""What ending an execution may take after its time: no reason to say that there was no room."""
_MOST_REPEATED = 2
"""Judgings at one time that are repeated in sandboxes of their own, each of which starts an interpreter."""
_pairs: WeakKeyDictionary[Sandbox, asyncio.Semaphore] = WeakKeyDictionary()
_repeating: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
_asking_again: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class BrokenTask(ValueError):
    """What is wrong with a task, whatever the answer."""


class SandboxBusy(InfraError):
    """The sandbox had no place in time: nothing has been judged."""


_OURS = (Aborted, ConfigError, MissingExtraError, BrokenTask, SandboxBusy)
"""What no answer brings about."""


async def judged(
    name: str,
    judge: Callable[[str, SandboxFactory], Awaitable[Parts]],
    answer: str,
    harmless: str,
) -> Parts:
    """What `judge` gives for the answer. Where it breaks, it is repeated, and compared with `harmless`.

    The repetition has sandboxes of its own, so that nobody else's doing can break it. It breaks again, and
    judging the harmless answer does not, before and after: then it is the answer's doing, and scores 0.
    Starting a sandbox is what costs time: all three share one, unless the answer has ruined it.
    """

    async def call() -> Parts:
        try:
            return await judge(answer, shared_sandbox)
        except BrokenTask as error:
            raise InfraError(
                Boundary.REWARD, f"the reward {name!r} failed: {error}", retriable=False
            ) from error
        except _OURS:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is: the control says whose it is
            return await _repeated(name, judge, answer, harmless, error)

    return await with_retries(name, call)


async def _repeated(
    name: str,
    judge: Callable[[str, SandboxFactory], Awaitable[Parts]],
    answer: str,
    harmless: str,
    first: Exception,
) -> Parts:
    async def control(boxes: SandboxFactory) -> Parts:
        try:
            return await judge(harmless, boxes)
        except Exception as error:
            _log.debug("judging a harmless answer fails as well: %s", error)
            if isinstance(first, SessionLost):  # judging keeps no state, so another try may help
                raise InfraError(Boundary.SANDBOX, str(first)) from first
            raise first from error

    parts: Parts = {}
    repeating = _repeating.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MOST_REPEATED))
    async with repeating:
        async with _boxes_of_its_own() as boxes:
            await control(boxes)
            try:
                return await judge(answer, boxes)
            except _OURS:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                again = error
            with suppress(Exception):  # the answer may have ruined this sandbox, but no new one
                parts = await control(boxes)
        if not parts:
            async with _boxes_of_its_own() as boxes:
                parts = await control(boxes)
    _log.warning(
        "the reward %r breaks over an answer, which scores 0, and not over another one: %s: %.500s",
        *(name, type(again).__name__, again),
    )
    return {part: value if part.endswith("_total") else 0.0 for part, value in parts.items()}


def repeat_slots() -> asyncio.Semaphore:
    """For part of a judging that is repeated in a sandbox of its own, also while all of it is."""
    return _asking_again.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MOST_REPEATED))


@asynccontextmanager
async def _boxes_of_its_own() -> AsyncIterator[SandboxFactory]:
    """Sandboxes that nobody else uses, closed at the end."""
    made: dict[SandboxConfig, Sandbox] = {}

    def box(config: SandboxConfig) -> Sandbox:
        return made.setdefault(config, Sandbox(config.model_copy(update={"workers": 1})))

    async with AsyncExitStack() as stack:
        stack.push_async_callback(lambda: asyncio.gather(*(one.close() for one in made.values())))
        yield box


class TimeBudget:
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
            raise SandboxBusy(
                Boundary.SANDBOX,
                f"the sandbox had no room within {self._seconds:g} seconds; raise its max_sessions or "
                "total_seconds, or score fewer answers at once",
            ) from error
        waited = max(0.0, time.monotonic() - started - busy(found))
        self._patience -= waited
        self._deadline += waited
        return found


@asynccontextmanager
async def two_sessions(sandbox: Sandbox, clock: TimeBudget) -> AsyncIterator[None]:
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


class SandboxProvider:
    """A sandbox by its settings."""

    def __init__(self, config: SandboxConfig | Mapping[str, Any] | None, name: str) -> None:
        if isinstance(config, Mapping):
            config = SandboxConfig.parse(config, f"the sandbox of {name!r}")
        self.config = config or SandboxConfig()

    def reading(self, paths: tuple[str, ...]) -> SandboxConfig:
        """The settings of a sandbox that can also read these files."""
        readable = tuple(dict.fromkeys([*self.config.readable, *paths]))
        return self.config.model_copy(update={"readable": readable})

    async def start(self, boxes: SandboxFactory, config: SandboxConfig | None = None) -> Sandbox:
        """The sandbox, started; one that does not start is nobody's answer."""
        sandbox = boxes(config or self.config)
        await sandbox.start()
        return sandbox
