"""Fault attribution: when scoring an answer breaks, is the answer or the infrastructure at fault?

Everything that an answer can cause is the answer's fault and scores 0: otherwise a policy could learn to
leave its wrong answers unscored. Infrastructure is at fault only where the host can prove it: a control answer
that does nothing, scored on the same task right after it, breaks as well. The control runs every time: a
machine that was healthy a moment ago proves nothing.

Waiting for a place in the sandbox is never the answer's fault (`TimeBudget`, `SandboxBusy`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from ludus.core.failures import Aborted, Boundary, ConfigError, InfraError, MissingExtraError
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.reward import CheckedReward, with_retries
from ludus.rewards.scores import EXECUTION, OptionsReward, Parts
from ludus.sandbox import Execution, Sandbox, SandboxConfig, SessionLost, shared_sandbox

T = TypeVar("T")
SandboxFactory = Callable[[SandboxConfig], Sandbox]
"""Gives the sandbox for some settings."""
ScoreAnswer = Callable[[str, SandboxFactory], Awaitable[Parts]]

_log = logging.getLogger(__name__)

_MARGIN_SECONDS = 1.0
"""Seconds to end an execution after its time limit; not counted as waiting for a place."""
_MOST_REPEATED = 2
"""How many answers are scored again at a time: each needs a new sandbox, which starts an interpreter."""

Slots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
_pair_slots: WeakKeyDictionary[Sandbox, asyncio.Semaphore] = WeakKeyDictionary()
_repeat_slots: Slots = WeakKeyDictionary()
_gold_slots: Slots = WeakKeyDictionary()


class BrokenTask(ValueError):
    """The task itself is wrong: no answer can be scored."""


class SandboxBusy(InfraError):
    """The sandbox had no place in time: nothing was scored."""


_NEVER_THE_ANSWERS_FAULT = (Aborted, ConfigError, MissingExtraError, BrokenTask, SandboxBusy)


async def score_with_control(name: str, score: ScoreAnswer, answer: str, control: str) -> Parts:
    """Score an answer; if that breaks, repeat it and compare with the control answer.

    The repetition runs in new sandboxes, which no other episode can break. If it breaks again, and scoring the
    control answer works before and after, it is the answer's fault, and the score is 0.
    """

    async def call() -> Parts:
        try:
            return await score(answer, shared_sandbox)
        except BrokenTask as error:
            raise InfraError(
                Boundary.REWARD, f"the reward {name!r} failed: {error}", retriable=False
            ) from error
        except _NEVER_THE_ANSWERS_FAULT:
            raise
        except Exception as error:  # noqa: BLE001 - the control answer decides whose fault it is
            async with _slots_of_loop(_repeat_slots):
                return await _score_again(name, score, answer, control, error)

    return await with_retries(name, call)


async def _score_again(
    name: str, score: ScoreAnswer, answer: str, control: str, first: Exception
) -> Parts:
    """Control, answer, control: in one sandbox, as it is slow to start, unless the answer ruined it."""
    parts: Parts = {}
    async with _private_sandboxes() as sandboxes:
        await _score_control(score, control, sandboxes, first)
        try:
            return await score(answer, sandboxes)
        except _NEVER_THE_ANSWERS_FAULT:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            again = error
        with suppress(Exception):
            parts = await _score_control(score, control, sandboxes, first)
    if not parts:
        async with _private_sandboxes() as sandboxes:
            parts = await _score_control(score, control, sandboxes, first)
    _log.warning(
        "the reward %r breaks over an answer, which scores 0, and not over a control answer: %s: %.500s",
        *(name, type(again).__name__, again),
    )
    return {part: value if part.endswith("_total") else 0.0 for part, value in parts.items()}


async def _score_control(
    score: ScoreAnswer, control: str, sandboxes: SandboxFactory, first: Exception
) -> Parts:
    """The control answer's parts; if it breaks as well, raise the first error: infrastructure's."""
    try:
        return await score(control, sandboxes)
    except Exception as error:
        _log.debug("scoring a control answer fails as well: %s", error)
        if isinstance(first, SessionLost):  # scoring keeps no state, so another try may help
            raise InfraError(Boundary.SANDBOX, str(first)) from first
        raise first from error


def gold_slots() -> asyncio.Semaphore:
    """Limits how many gold results are computed again at a time, each in a new sandbox."""
    return _slots_of_loop(_gold_slots)


def _slots_of_loop(slots: Slots) -> asyncio.Semaphore:
    return slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MOST_REPEATED))


@asynccontextmanager
async def _private_sandboxes() -> AsyncIterator[SandboxFactory]:
    """Sandboxes that no other episode uses, closed at the end."""
    made: dict[SandboxConfig, Sandbox] = {}

    def sandbox(config: SandboxConfig) -> Sandbox:
        return made.setdefault(config, Sandbox(config.model_copy(update={"workers": 1})))

    async with AsyncExitStack() as stack:
        stack.push_async_callback(lambda: asyncio.gather(*(one.close() for one in made.values())))
        yield sandbox


class TimeBudget:
    """How long scoring one answer may still take.

    Waiting for a place in the sandbox does not count. Waiting has a limit of as many seconds, after which it is
    an `InfraError`, never a failed test.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._patience = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def expired(self) -> bool:
        return time.monotonic() > self._deadline

    async def waiting(self, awaited: Awaitable[T]) -> T:
        return await self._limited(awaited, lambda _: 0.0, 0.0)

    async def running(self, running: Awaitable[Execution], longest: float) -> Execution:
        """An execution of at most `longest` seconds, which may have to wait for a place before."""
        return await self._limited(
            running, lambda execution: execution.seconds, longest + _MARGIN_SECONDS
        )

    async def _limited(self, awaited: Awaitable[T], busy: Callable[[T], float], longest: float) -> T:
        started = time.monotonic()
        try:
            async with asyncio.timeout(max(self._patience, 0.0) + longest) as limit:
                found = await awaited
        except TimeoutError as error:
            if not limit.expired():
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
async def two_sessions(sandbox: Sandbox, budget: TimeBudget) -> AsyncIterator[None]:
    """A place for scoring that holds one session while it waits for another.

    Few enough at once that each gets its second session: otherwise all could hold one and wait for ever.
    """
    if sandbox not in _pair_slots:
        _pair_slots[sandbox] = asyncio.Semaphore(max(1, sandbox.config.max_sessions // 2))
    slots = _pair_slots[sandbox]
    await budget.waiting(slots.acquire())
    try:
        yield
    finally:
        slots.release()


@dataclass(kw_only=True, eq=False)
class SandboxedReward(OptionsReward, CheckedReward, ABC):
    """A reward that runs an answer's code in a sandbox; subclasses score it in `_score_answer`."""

    control_answer: ClassVar[str] = ""

    sandbox: SandboxConfig | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.sandbox
        if isinstance(given, Mapping):
            given = SandboxConfig.parse(given, f"the sandbox of {self.name!r}")
        self.sandbox_config = given or SandboxConfig()

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        score, answer = partial(self._score_answer, task), self._answer_of(trajectory)
        parts = await score_with_control(self.name, score, answer, self.control_answer)
        seconds = trajectory.seconds
        seconds[EXECUTION] = seconds.get(EXECUTION, 0.0) + parts.pop(EXECUTION, 0.0)
        return parts

    def _answer_of(self, trajectory: Trajectory) -> str:
        return trajectory.answer or ""

    @abstractmethod
    async def _score_answer(self, task: Task, answer: str, sandboxes: SandboxFactory) -> Parts:
        """The parts of an answer, and under `EXECUTION` the seconds that it ran.

        An error is the answer's fault unless the control answer fails as well.
        """

    async def _sandbox(self, sandboxes: SandboxFactory, readable: tuple[str, ...] = ()) -> Sandbox:
        """The reward's sandbox, started, with further files that it can read."""
        paths = tuple(dict.fromkeys([*self.sandbox_config.readable, *readable]))
        sandbox = sandboxes(self.sandbox_config.model_copy(update={"readable": paths}))
        await sandbox.start()
        return sandbox
