"""The engine's thread, and the admission queue in front of it: where event loops meet the thread of the model.

`engine.py` says what waits for what.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ludus.core.failures import EngineError
from ludus.core.generation import OnTokens

T = TypeVar("T")

# The thread ends after this long without work; the next call starts another.
_IDLE_SECONDS = 2.0
_EXIT_SECONDS = 10.0


class ReplyFuture:
    """A future on the caller's event loop, to be resolved from the engine's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def settle(self, outcome: object) -> None:
        """Set the result, or raise the exception in the caller. On its event loop only."""
        if self.future.done():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class TokenStream:
    """Tells a caller what was sampled for it so far, before its future is resolved."""

    def __init__(self, reply_future: ReplyFuture, tokens: list[int], on_tokens: OnTokens) -> None:
        """`tokens` are the request's own: a prompt now, which grows."""
        self.reply_future, self.loop = reply_future, reply_future.loop
        self._tokens, self._told, self._on_tokens = tokens, len(tokens), on_tokens

    def take(self) -> list[int]:
        """The tokens since the last time. On the engine's thread only."""
        new = self._tokens[self._told :]
        self._told += len(new)
        return new

    def settle(self, outcome: Any) -> None:
        """Hand tokens to the caller, if it is still there. On its event loop only."""
        if not self.reply_future.future.done():
            self._on_tokens(outcome)


Receiver = ReplyFuture | TokenStream


def _resolve_futures(
    loop: asyncio.AbstractEventLoop, outcomes: Sequence[tuple[Receiver, object]]
) -> bool:
    """Settle futures of one loop, from any thread; False when that loop is closed and its callers are gone."""

    def settle() -> None:
        for receiver, outcome in outcomes:
            receiver.settle(outcome)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return False
    return True


class EngineThread:
    """Runs commands in order, and `step` again and again for as long as it says there is work.

    `step` returns whether there is more to do; `rest` is called whenever stepping ends for now. Every
    future is resolved: by the command that got it, or with an error when the thread closes or breaks.
    """

    def __init__(self, step: Callable[[], bool], rest: Callable[[], None]) -> None:
        self._step, self._rest = step, rest
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._unresolved: set[ReplyFuture] = set()
        self._outbox: list[tuple[Receiver, object]] = []
        self._thread: threading.Thread | None = None
        self._has_work = False
        self._is_paused = False
        self.closed: EngineError | None = None
        """The error that every further call gets, once closed."""
        _living.add(self)

    def post(self, command: Callable[[], None], reply_future: ReplyFuture | None = None) -> None:
        """Run `command` on the thread, between steps; it, or what it starts, resolves `reply_future`."""
        with self._condition:
            self.check_open()
            if reply_future is not None:
                self._unresolved.add(reply_future)
            self._inbox.append(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ludus-engine", daemon=True)
                self._thread.start()
            self._condition.notify()

    def check_open(self) -> None:
        """Raise if the engine is closed or has stopped."""
        if self.closed is not None:
            raise _again(self.closed)

    async def call(self, command: Callable[[], T]) -> T:
        """Run `command` on the thread, between steps, and return its result."""
        reply_future = ReplyFuture()

        def answer() -> None:
            try:
                outcome: object = command()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                outcome = error
            self.reply(reply_future, outcome)

        self.post(answer, reply_future)
        result: T = await reply_future.future
        return result

    def reply(self, reply_future: ReplyFuture, outcome: object) -> None:
        """Resolve a caller's future after the current step. On the thread only."""
        self._unresolved.discard(reply_future)
        self._outbox.append((reply_future, outcome))

    def send(self, stream: TokenStream, tokens: list[int]) -> None:
        """Hand tokens to a caller after the current step, in order with the replies. On the thread only."""
        self._outbox.append((stream, tokens))

    def awaits(self, reply_future: ReplyFuture) -> bool:
        """Whether a caller has no outcome yet. On the thread only."""
        return reply_future in self._unresolved

    def set_paused(self, paused: bool) -> None:
        """No step begins while paused. On the thread only."""
        self._is_paused = paused
        if paused:
            self._rest()

    def close(self, error: EngineError) -> threading.Thread | None:
        """Accept nothing more, fail all pending calls with `error`, stop; the thread to join, if any."""
        with self._condition:
            if self.closed is None:
                self.closed = error
            if self._thread is None:
                self._fail_all(error)
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
            self._fail_all(error)

    def _fail_all(self, error: EngineError) -> None:
        self._inbox.clear()
        self._outbox += [(reply_future, _again(error)) for reply_future in self._unresolved]
        self._unresolved.clear()
        self._deliver()

    def _deliver(self) -> None:
        """One wake-up for each loop, however many of its callers are answered."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Receiver, object]]] = {}
        for receiver, outcome in self._outbox:
            by_loop.setdefault(receiver.loop, []).append((receiver, outcome))
        self._outbox.clear()
        for loop, outcomes in by_loop.items():
            _resolve_futures(loop, outcomes)


def _again(error: EngineError) -> EngineError:
    """A copy of an error for one caller: each adds its own traceback."""
    copy = EngineError(str(error), retriable=error.retriable)
    copy.__cause__ = error.__cause__
    return copy


_living: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """A daemon thread that is inside the model while the interpreter goes down can crash it."""
    for engine in list(_living):
        thread = engine.close(EngineError("the interpreter is shutting down", retriable=False))
        if thread is not None:
            thread.join(_EXIT_SECONDS)


class _Waiter(ReplyFuture):
    """A caller in the queue; its future is done when it is admitted or cancelled."""

    def __init__(self, tag: str | None) -> None:
        super().__init__()
        self.tag, self.is_cancelled = tag, False

    def wake(self) -> bool:
        return _resolve_futures(self.loop, [(self, None)])


class AdmissionQueue:
    """Admits `capacity` callers, first come, first served, across threads and event loops.

    Each one that leaves, from any thread, admits the next.
    """

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self.free = capacity
        """How many callers could enter without waiting."""
        self._queue: deque[_Waiter] = deque()
        self._arriving: set[_Waiter] = set()  # queued, or admitted and not yet awake

    async def enter(self, tag: str | None = None) -> bool:
        """Wait to be admitted; False when `cancel` was called meanwhile."""
        with self._lock:
            if self.free > 0 and not self._queue:
                self.free -= 1
                return True
            waiter = _Waiter(tag)
            self._queue.append(waiter)
            self._arriving.add(waiter)
        entered = False
        try:
            await waiter.future
            entered = not waiter.is_cancelled
        finally:
            with self._lock:
                self._arriving.discard(waiter)
                is_queued = waiter in self._queue
                if is_queued:
                    self._queue.remove(waiter)
            if not entered and not is_queued:
                self.leave()  # it was given a place just now
        return entered

    def leave(self) -> None:
        """Give a place back."""
        with self._lock:
            while self._queue:
                if self._queue.popleft().wake():
                    return
            self.free += 1

    def cancel(self, tag: str | None = None) -> None:
        """Turn away the callers that wait under this tag, or all."""
        with self._lock:
            for waiter in self._arriving:
                if tag is None or waiter.tag == tag:
                    waiter.is_cancelled = True
                    waiter.wake()
