"""Threads, event loops and the garbage collector: sync code from async code, and async code from sync code.

Who waits for whom. `ThreadExecutor` runs sync functions in daemon threads; a caller awaits its own future.
Jobs wait in one first-in-first-out queue, from which at most `max_workers` threads take. A deadline counts
from the moment the function starts, so a full queue is never charged to it. A thread cannot be killed: one
whose job passed its deadline, or whose caller was cancelled, is *abandoned*. It no longer counts against
`max_workers`, and ends when its function returns, if ever; `max_abandoned` bounds what code that hangs for
ever can take.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ludus.core.failures import LudusError
from ludus.core.user_code import pending_locations, thread_location

T = TypeVar("T")

_IDLE_SECONDS = 10.0


class DeadlineExceeded(TimeoutError):
    """The function ran longer than its caller allows, as against one that raised `TimeoutError`."""

    place: str | None = None
    """Where in user code it was at the deadline."""


class WorkerError(LudusError):
    """The worker failed, not the function it ran: it died, could not start, or none is left."""


class FunctionExited(Exception):
    """The function raised something that would end a program: `SystemExit`, `KeyboardInterrupt`, ..."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    context: contextvars.Context
    started: float | None = None
    thread: int | None = None
    finished: bool = False
    dropped: bool = False
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.context.run(self.call)
        except BaseException as error:  # noqa: BLE001 - whatever it raised belongs to the caller
            self.error = error

    def wake(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._settle)
        except RuntimeError:
            self.dropped = True  # the event loop was closed: no caller waits any more

    def _settle(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def outcome(self) -> Any:
        error, self.error = self.error, None
        if error is None:
            return self.value
        if isinstance(error, Exception):
            raise error
        raise FunctionExited(error) from error


class ThreadExecutor:
    """Runs functions in daemon threads; works from any number of event loops at once."""

    def __init__(
        self,
        max_workers: int = 256,
        *,
        max_abandoned: int = 1024,
        name: str = "ludus",
        keep_idle: bool = False,
    ) -> None:
        """With `keep_idle`, a thread that has nothing to do stays until `close`."""
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, not {max_workers}")
        self.max_workers = max_workers
        self.max_abandoned = max_abandoned
        self.name = name
        self._keep_idle = keep_idle
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._workers = 0
        self._idle = 0
        self._abandoned = 0
        self._closed = False

    @property
    def abandoned(self) -> int:
        """How many threads are stuck in functions whose callers are gone."""
        return self._abandoned

    @property
    def workers(self) -> int:
        """How many threads are at work or ready for it."""
        return self._workers

    async def run(
        self, function: Callable[..., T], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> T:
        """The function's result. The caller's context variables are visible to it."""
        loop = asyncio.get_running_loop()
        call = partial(function, *args, **kwargs)
        job = _Job(call, loop, loop.create_future(), contextvars.copy_context())
        self._submit(job)
        try:
            if not await _finished_in_time(job, timeout):
                late = DeadlineExceeded(f"no result within {timeout:g} seconds")
                late.place = thread_location(job.thread)
                raise late
        finally:
            if not job.future.done() or job.future.cancelled():
                self._drop(job)
        result: T = job.outcome()
        return result

    async def close(self) -> None:
        """Let idle threads end, and refuse new work; what runs is abandoned, what waits is dropped."""
        with self._changed:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()
            for job in waiting:
                job.finished, job.error = True, WorkerError(f"the executor {self.name!r} was closed")
            self._changed.notify_all()
        for job in waiting:
            job.wake()

    def _submit(self, job: _Job) -> None:
        with self._changed:
            if self._closed:
                raise WorkerError(f"the executor {self.name!r} is closed")
            if self._abandoned >= self.max_abandoned:
                raise WorkerError(
                    f"{self._abandoned} threads are stuck in functions that never returned; run code "
                    "that may hang in a process (process=True), where it can be killed"
                )
            self._queue.append(job)
            if self._idle >= len(self._queue):
                self._changed.notify()
            elif self._workers < self.max_workers:
                self._start_worker()
            if not self._workers:
                self._queue.remove(job)
                raise WorkerError("the system allows no more threads in this process")

    def _start_worker(self) -> None:
        try:
            threading.Thread(target=self._work, name=f"{self.name}-worker", daemon=True).start()
        except RuntimeError:
            return  # the system is out of threads; those there are go on with the queue
        self._workers += 1

    def _drop(self, job: _Job) -> None:
        """The caller of `job` is gone: take it from the queue, or abandon its thread."""
        with self._changed:
            if job.finished or job.dropped:
                return
            job.dropped = True
            if job.started is None:
                self._queue.remove(job)
                return
            self._abandoned += 1
            self._workers -= 1
            if self._queue and not self._idle and not self._closed:
                self._start_worker()

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            _running.add(job)
            job.run()
            _running.discard(job)
            with self._changed:
                job.finished = True
                if job.dropped:
                    self._abandoned -= 1
                    return
            job.wake()
            del job

    def _next_job(self) -> _Job | None:
        with self._changed:
            self._idle += 1
            try:
                seconds = None if self._keep_idle else _IDLE_SECONDS
                self._changed.wait_for(lambda: self._queue or self._closed, timeout=seconds)
            finally:
                self._idle -= 1
            if not self._queue:
                self._workers -= 1
                return None
            job = self._queue.popleft()
            job.started, job.thread = time.monotonic(), threading.get_ident()
            return job


_running: set[_Job] = set()
"""Jobs that threads of all executors are running."""


def busy_locations() -> list[str]:
    """Where in user code coroutines of this event loop wait, and functions run that have a caller."""
    threads = [thread_location(job.thread) for job in list(_running) if not job.dropped]
    return list(
        dict.fromkeys([*pending_locations(), *(place for place in threads if place is not None)])
    )


async def _finished_in_time(job: _Job, timeout: float | None) -> bool:
    if timeout is None:
        await job.future
        return True
    left = timeout
    while left > 0:
        await asyncio.wait((job.future,), timeout=left)
        if job.future.done():
            return True
        left = timeout if job.started is None else job.started + timeout - time.monotonic()
    return False


_shared: ThreadExecutor | None = None
_shared_lock = threading.Lock()


def shared_threads() -> ThreadExecutor:
    """The executor that everything in this process shares; made when first asked for."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = ThreadExecutor(name="ludus-shared")
        return _shared


def _forget_shared_threads() -> None:
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_shared_threads)  # threads do not survive a fork


def run_sync(
    function: Callable[..., T], *args: Any, timeout: float | None = None, **kwargs: Any
) -> Coroutine[Any, Any, T]:
    """Await a sync function that runs in a shared daemon thread; `TimeoutError` when it takes longer."""
    return shared_threads().run(function, *args, timeout=timeout, **kwargs)


_own_threads: dict[int, ThreadExecutor] = {}
"""Objects that have a thread of their own, by their ids."""


def set_own_thread(owner: object, thread: ThreadExecutor | None) -> None:
    """Sync methods of `owner`, and functions that are given it, run in this thread; None ends that."""
    if thread is None:
        _own_threads.pop(id(owner), None)
    else:
        _own_threads[id(owner)] = thread


def threads_for(function: Callable[..., Any], *given: Any) -> ThreadExecutor:
    """Where to run a sync function: in the own thread of its object, or of what it is given; else anywhere."""
    for one in (getattr(function, "__self__", None), *given):
        if (own := _own_threads.get(id(one))) is not None:
            return own
    return shared_threads()


async def run_to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await what must not be cut off: a cancellation meanwhile is raised at the caller's next await."""
    caller, work, cancelled = asyncio.current_task(), asyncio.ensure_future(coroutine), False
    assert caller is not None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise
            cancelled = True
            caller.uncancel()
        except BaseException:  # noqa: BLE001 - the coroutine's own, which `result` raises below
            break
    if cancelled:
        caller.cancel()
    return work.result()


_gc_lock = threading.RLock()
_gc_frozen_by = 0
"""How many blocks of `frozen_gc` are open."""


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Objects that exist now are exempt from garbage collection until the end (`gc.freeze`).

    A process that has imported torch holds a million objects that never become garbage. A full collection
    walks over all of them, and for that fifth of a second no episode goes on and no GPU gets work. Objects made
    inside are collected as usual; only a cycle among older objects has to wait. May be nested, and entered by
    several threads. A heap that other code has frozen stays as it is.
    """
    global _gc_frozen_by
    with _gc_lock:
        is_ours = _gc_frozen_by > 0 or gc.get_freeze_count() == 0
        if is_ours and _gc_frozen_by == 0:
            gc.collect()
            gc.freeze()
        _gc_frozen_by += is_ours
    try:
        yield
    finally:
        with _gc_lock:
            _gc_frozen_by -= is_ours
            if is_ours and _gc_frozen_by == 0:
                gc.unfreeze()


# The event loop of a sync caller


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`; where a loop is running already, as in a notebook, on a loop in a thread of its own.

    The caller waits either way. An interrupt cancels the coroutine, and is raised when that has ended.
    """
    if not _is_in_a_loop():
        return asyncio.run(coroutine)
    outcome: Future[T] = Future()
    began: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        began.set_result((asyncio.get_running_loop(), task))
        return await coroutine

    def work() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="ludus-run")
    thread.start()
    try:
        return outcome.result()
    except KeyboardInterrupt:
        loop, task = began.result()
        if not outcome.done():
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
