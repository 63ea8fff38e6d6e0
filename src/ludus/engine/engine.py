"""`EmbeddedEngine`: samples from the very module that is being trained.

Who waits for whom: callers live on event loops, the model on one thread of its own (`EngineThread`). A caller
posts its request to the thread and awaits a future. The thread takes in what has arrived, runs a step, and
delivers what is finished, with one wake-up per step and loop. Everything that touches the scheduler runs on the
thread, between steps, in the order in which it was asked for. `max_waiting` bounds the scheduler's queue:
callers beyond it wait in an `AdmissionQueue`. The thread ends after a while without work and starts again with
the next request, so that a forgotten engine leaves no thread behind. On a GPU a step is launched while the one
before it runs (see `engine_core`); a pause, new weights and a closing engine wait for both.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import nn

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, FinishReason, Sampling, VersionSpan
from ludus.core.messages import Media
from ludus.core.tokenizer import Tokenizer
from ludus.engine.config import EngineConfig, EngineStats
from ludus.engine.engine_core import EngineCore
from ludus.engine.hf_model import (
    cache_blocks,
    context_limit,
    max_step_tokens,
    releases_memory,
    sampling_mode,
    vocabulary_size,
)
from ludus.engine.loading import use_ludus_attention
from ludus.engine.scheduler import Decode, Marks, Request, StopChecker

T = TypeVar("T")

# The thread ends after this long without work; the next call starts another.
_IDLE_SECONDS = 2.0
_EXIT_SECONDS = 10.0


class EmbeddedEngine:
    """An `Engine` over a Hugging Face causal LM, which it shares with the trainer.

    `decode` is needed for stop strings only: a tokenizer, or a function from tokens to text. The trainer
    calls `pause` before it touches the weights, then `update_weights` and `resume`. `version` is the policy
    version before the first update.
    """

    def __init__(
        self,
        model: nn.Module,
        decode: Tokenizer | Decode | None = None,
        config: EngineConfig | None = None,
        *,
        version: int = 0,
    ) -> None:
        use_ludus_attention(model)
        self.config = config or EngineConfig()
        self.model = model
        self._decode: Decode | None = decode if callable(decode) or decode is None else decode.decode
        self._vocabulary = vocabulary_size(model)
        self._context = context_limit(model)
        self._core = EngineCore(
            model,
            blocks=cache_blocks(model, self.config),
            block_size=self.config.block_size,
            max_running=self.config.max_running,
            tokens_per_step=max_step_tokens(model, self.config),
            version=version,
        )
        self._admission = AdmissionQueue(self.config.max_waiting)
        self._thread = EngineThread(self._step, self._rest)
        self._mode = ExitStack()
        self._is_sampling = False

    @property
    def policy_version(self) -> int:
        return self._core.version

    @property
    def stats(self) -> EngineStats:
        """Counters for metrics; they grow while the engine works."""
        return self._core.stats

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[Media] = (),
    ) -> Completion:
        if media:
            raise EngineError("this engine reads text only, not media", retriable=False)
        context = self._checked(tokens)
        limit = self._limit(len(context), sampling)
        stop_checker = self._stop_checker(sampling)
        if not await self._admission.enter(session):
            self._thread.check_open()
            versions = (VersionSpan(0, self.policy_version),)
            return Completion([], [], FinishReason.ABORTED, versions)
        reply_future = ReplyFuture()
        request = Request(
            tokens=context,
            prompt=len(context),
            limit=limit,
            sampling=sampling,
            session=session,
            reply=lambda outcome: self._thread.reply(reply_future, outcome),
            leave_queue=self._admission.leave,
            stop_tokens=frozenset(sampling.stop_tokens),
            stop_checker=stop_checker,
            seen=self._seen(context, sampling),
        )
        await self._run(request, reply_future)
        result: Completion = reply_future.future.result()
        return result

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        context = self._checked(tokens)
        sampling = Sampling(temperature=temperature)
        self._limit(len(context), None)
        reply_future = ReplyFuture()
        request = Request(
            tokens=context,
            prompt=len(context),
            limit=len(context),
            sampling=sampling,
            is_score=True,
            reply=lambda outcome: self._thread.reply(reply_future, outcome),
        )
        await self._run(request, reply_future)
        result: list[float] = reply_future.future.result()
        return result

    async def _run(self, request: Request, reply_future: ReplyFuture) -> None:
        """Post a request to the thread and wait for its outcome; a cancelled caller cancels the request."""
        try:
            self._thread.post(lambda: self._core.submit(request), reply_future)
        except EngineError:
            request.started()
            raise
        try:
            await reply_future.future
        except asyncio.CancelledError:
            if self._thread.closed is None:
                self._thread.post(lambda: self._core.cancel(request))
            raise

    async def fork(self, session: str, into: str) -> None:
        await self._thread.call(lambda: self._core.scheduler.fork(session, into))

    async def release(self, session: str) -> None:
        if self._thread.closed is None:
            await self._thread.call(lambda: self._core.scheduler.release(session))

    async def abort(self, session: str) -> None:
        self._admission.cancel(session)
        if self._thread.closed is None:
            await self._thread.call(lambda: self._core.abort(session))

    async def pause(self) -> None:
        await self._thread.call(self._pause)

    async def resume(self) -> None:
        await self._thread.call(self._resume)

    async def update_weights(self) -> int:
        return await self._thread.call(self._core.update_weights)

    async def forget(self) -> None:
        """Drop the KV cache and all sessions; the policy version stays."""
        await self._thread.call(self._core.forget)

    async def close(self) -> None:
        thread = self._thread.close(EngineError("the engine is closed", retriable=False))
        self._admission.cancel()
        if thread is not None:
            await asyncio.to_thread(thread.join)
        self._core.close()

    def _pause(self) -> None:
        """On the thread: no step is in flight afterwards."""
        self._core.drain()
        if releases_memory(self.model, self.config):
            self._core.release_memory()
        self._thread.set_paused(True)

    def _resume(self) -> None:
        self._core.refresh()
        self._thread.set_paused(False)

    def _step(self) -> bool:
        """On the thread: one step if there is work; whether there is more."""
        if not self._core.has_work:
            return False
        if not self._is_sampling:
            self._mode.enter_context(sampling_mode(self.model))
            self._is_sampling = True
        self._core.step()
        return self._core.has_work

    def _rest(self) -> None:
        """On the thread: restore the module's training mode."""
        self._mode.close()
        self._is_sampling = False

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        self._thread.check_open()
        array = np.asarray(tokens)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise EngineError("a context must be a non-empty list of token ids", retriable=False)
        if array.min() < 0 or array.max() >= self._vocabulary:
            wrong = int(array.min()) if array.min() < 0 else int(array.max())
            raise EngineError(
                f"token {wrong} is not in the model's vocabulary of {self._vocabulary}", retriable=False
            )
        context: list[int] = array.tolist()
        return context

    def _limit(self, prompt: int, sampling: Sampling | None) -> int:
        """Most tokens of a request, its prompt included; raises when it can never be served."""
        ceiling = self._context or prompt + (sampling.max_tokens if sampling else 0)
        if prompt > ceiling or (sampling and prompt == ceiling):
            raise EngineError(
                f"the context has {prompt} tokens and the model's limit (max_position_embeddings) is "
                f"{ceiling}: nothing can follow",
                retriable=False,
            )
        limit = min(ceiling, prompt + sampling.max_tokens) if sampling else prompt
        room = self._core.room
        if limit > room:
            raise EngineError(
                f"a request of up to {limit} tokens can never fit into the KV cache of {room}: raise "
                "engine.cache_tokens or engine.memory, or lower budgets.max_turn_tokens or budgets.max_tokens",
                retriable=False,
            )
        return limit

    def _stop_checker(self, sampling: Sampling) -> StopChecker | None:
        if not sampling.stop:
            return None
        if self._decode is None:
            raise EngineError(
                "stop strings need a tokenizer: EmbeddedEngine(model, tokenizer)", retriable=False
            )
        return StopChecker(sampling.stop, self._decode)

    def _seen(self, context: list[int], sampling: Sampling) -> Marks | None:
        if sampling.repetition_penalty == 1:
            return None
        seen = np.zeros(self._vocabulary, dtype=np.bool_)
        seen[context] = True
        return seen


class ReplyFuture:
    """A future on the caller's event loop, to be resolved from the engine's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()


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
        self._outbox: list[tuple[ReplyFuture, object]] = []
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
        """What `command` gives when run on the thread, between steps."""
        reply_future = ReplyFuture()

        def answer() -> None:
            try:
                self.reply(reply_future, command())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                self.reply(reply_future, error)

        self.post(answer, reply_future)
        result: T = await reply_future.future
        return result

    def reply(self, reply_future: ReplyFuture, outcome: object) -> None:
        """Resolve a caller's future after the current step. On the thread only."""
        self._unresolved.discard(reply_future)
        self._outbox.append((reply_future, outcome))

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
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], object]]] = {}
        for reply_future, outcome in self._outbox:
            by_loop.setdefault(reply_future.loop, []).append((reply_future.future, outcome))
        self._outbox.clear()
        for loop, resolved in by_loop.items():
            try:
                loop.call_soon_threadsafe(_settle, resolved)
            except RuntimeError:  # the loop is closed: nobody waits on it
                continue


def _again(error: EngineError) -> EngineError:
    """The same error for another caller: a traceback belongs to one."""
    copy = EngineError(str(error), retriable=error.retriable)
    copy.__cause__ = error.__cause__
    return copy


def _settle(resolved: Iterable[tuple[asyncio.Future[Any], object]]) -> None:
    for future, outcome in resolved:
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


@dataclass(slots=True, eq=False)
class _Waiter:
    tag: str | None
    loop: asyncio.AbstractEventLoop
    admitted: asyncio.Future[None]
    is_cancelled: bool = False


class AdmissionQueue:
    """Admits `capacity` callers, first come, first served, across threads and event loops.

    Each one that leaves, from any thread, admits the next.
    """

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._free = capacity
        self._queue: deque[_Waiter] = deque()
        self._arriving: set[_Waiter] = set()  # queued, or admitted and not yet awake

    @property
    def free(self) -> int:
        """How many callers could enter without waiting."""
        return self._free

    async def enter(self, tag: str | None = None) -> bool:
        """Wait to be admitted; False when `cancel` was called meanwhile."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free > 0 and not self._queue:
                self._free -= 1
                return True
            waiter = _Waiter(tag, loop, loop.create_future())
            self._queue.append(waiter)
            self._arriving.add(waiter)
        entered = False
        try:
            await waiter.admitted
            entered = not waiter.is_cancelled
        finally:
            if not entered:
                self._withdraw(waiter)
            with self._lock:
                self._arriving.discard(waiter)
        return entered

    def leave(self) -> None:
        """Give a place back."""
        with self._lock:
            while self._queue:
                if _wake(self._queue.popleft()):
                    return
            self._free += 1

    def cancel(self, tag: str | None = None) -> None:
        """Turn away the callers that wait under this tag, or all."""
        with self._lock:
            for waiter in self._arriving:
                if tag is None or waiter.tag == tag:
                    waiter.is_cancelled = True
                    _wake(waiter)

    def _withdraw(self, waiter: _Waiter) -> None:
        """Leave the queue, or give back the place that was just given."""
        with self._lock:
            if waiter in self._queue:
                self._queue.remove(waiter)
                return
        self.leave()


def _wake(waiter: _Waiter) -> bool:
    try:
        waiter.loop.call_soon_threadsafe(_settle_admission, waiter.admitted)
    except RuntimeError:  # its loop is closed: nobody waits on it
        return False
    return True


def _settle_admission(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
