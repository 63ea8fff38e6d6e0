"""The thread that the model runs on, and the way in and out of it."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ludus.core.failures import EngineError

T = TypeVar("T")

# The thread ends after this long without work; the next call starts another.
_IDLE_SECONDS = 2.0
_EXIT_SECONDS = 10.0


class Mailbox:
    """A future on the caller's loop, to be answered from the engine's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()


class EngineThread:
    """Runs commands in order, and `step` again and again for as long as it says there is work.

    `step` returns whether there is more to do; `rest` is called whenever stepping ends for now. Every
    mailbox is answered: by whoever it was handed to, or with an error when the thread closes or breaks.
    """

    def __init__(self, step: Callable[[], bool], rest: Callable[[], None]) -> None:
        self._step, self._rest = step, rest
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._unanswered: set[Mailbox] = set()
        self._outbox: list[tuple[Mailbox, object]] = []
        self._thread: threading.Thread | None = None
        self._has_work = False
        self._is_paused = False
        self.closed: EngineError | None = None
        """Why nothing can be asked any more."""
        _living.add(self)

    def post(self, command: Callable[[], None], mailbox: Mailbox | None = None) -> None:
        """Have `command` run on the thread, between steps; it, or what it starts, answers `mailbox`."""
        with self._condition:
            self.check_open()
            if mailbox is not None:
                self._unanswered.add(mailbox)
            self._inbox.append(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ludus-engine", daemon=True)
                self._thread.start()
            self._condition.notify()

    def check_open(self) -> None:
        """Raise if nothing can be asked any more."""
        if self.closed is not None:
            raise _again(self.closed)

    async def call(self, command: Callable[[], T]) -> T:
        """What `command` gives when run on the thread, between steps."""
        mailbox = Mailbox()

        def answer() -> None:
            try:
                self.reply(mailbox, command())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                self.reply(mailbox, error)

        self.post(answer, mailbox)
        result: T = await mailbox.future
        return result

    def reply(self, mailbox: Mailbox, outcome: object) -> None:
        """Answer a caller, who hears of it after the current step. On the thread only."""
        self._unanswered.discard(mailbox)
        self._outbox.append((mailbox, outcome))

    def set_paused(self, paused: bool) -> None:
        """No step begins while paused. On the thread only."""
        self._is_paused = paused
        if paused:
            self._rest()

    def close(self, error: EngineError) -> threading.Thread | None:
        """Accept nothing more, answer everybody with `error`, stop; the thread to join, if any."""
        with self._condition:
            if self.closed is None:
                self.closed = error
            if self._thread is None:
                self._answer_all(error)
            self._condition.notify()
            return self._thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - dying silently would leave callers hanging
            failure = EngineError(
                f"the engine stopped: {type(error).__name__}: {error}; make a new one", retriable=False
            )
            failure.__cause__ = error
            with self._condition:
                self.closed = self.closed or failure
                self._stop(failure)

    def _turn(self) -> bool:
        """Commands, one step, replies; False when the thread may end."""
        with self._condition:
            if not self._inbox and not self._has_work and self.closed is None:
                self._rest()
                self._condition.wait_for(lambda: bool(self._inbox or self.closed), _IDLE_SECONDS)
            if self.closed is not None or not (self._inbox or self._has_work):
                self._stop(self.closed)
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command()
        self._has_work = not self._is_paused and self._step()
        self._deliver()
        return True

    def _stop(self, error: EngineError | None) -> None:
        """The thread's last act, under the lock."""
        self._rest()
        self._thread = None
        if error is not None:
            self._answer_all(error)

    def _answer_all(self, error: EngineError) -> None:
        self._inbox.clear()
        self._outbox += [(mailbox, _again(error)) for mailbox in self._unanswered]
        self._unanswered.clear()
        self._deliver()

    def _deliver(self) -> None:
        """One wake-up for each loop, however many of its callers are answered."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], object]]] = {}
        for mailbox, outcome in self._outbox:
            by_loop.setdefault(mailbox.loop, []).append((mailbox.future, outcome))
        self._outbox.clear()
        for loop, answers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_settle, answers)
            except RuntimeError:  # the loop is closed, and with it everybody who waited on it
                continue


def _again(error: EngineError) -> EngineError:
    """The same error for another caller: a traceback belongs to one."""
    copy = EngineError(str(error), retriable=error.retriable)
    copy.__cause__ = error.__cause__
    return copy


def _settle(answers: Iterable[tuple[asyncio.Future[Any], object]]) -> None:
    for future, outcome in answers:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


_living: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """A daemon thread that is inside the model while the interpreter goes down can crash it."""
    for engine in list(_living):
        thread = engine.close(EngineError("the interpreter is shutting down", retriable=False))
        if thread is not None:
            thread.join(_EXIT_SECONDS)
