"""`EmbeddedEngine`: samples from the very module that is being trained.

Who waits for whom: callers live on event loops, the model on one thread of its own (`EngineThread`). A caller
posts its request to the thread and awaits a future. The thread takes in what has arrived, runs a step, and
delivers what is finished, and the new tokens of requests with `on_tokens`, with one wake-up per step and loop.
Everything that touches the scheduler runs on the thread, between steps, in the order in which it was asked
for. `max_waiting` bounds the scheduler's queue: callers beyond it wait in an `AdmissionQueue`. The thread ends
after a while without work and starts again with the next request, so that a forgotten engine leaves no thread
behind. On a GPU a step is launched while the one before it runs (see `core.py`); a pause, new weights and a
closing engine wait for both.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import nn

from ludus.core.failures import EngineError, LudusError
from ludus.core.generation import (
    Completion,
    Engine,
    FinishReason,
    OnTokens,
    Sampling,
    VersionSpan,
    checked_context,
)
from ludus.core.messages import MediaSpan
from ludus.core.tokenizer import Tokenizer
from ludus.engine.config import EngineConfig, EngineSetup, EngineStats
from ludus.engine.embedded.core import (
    EngineCore,
    cache_blocks,
    max_step_tokens,
    releases_memory,
    state_slots,
)
from ludus.engine.embedded.request import (
    AdmissionQueue,
    Decode,
    Marks,
    Outbox,
    ReplyFuture,
    Request,
    StopChecker,
    TokenStream,
    copy_of,
)
from ludus.model.hf_model import context_limit, sampling_mode, unwrapped, vocabulary_size
from ludus.model.image_layout import ContextLayout
from ludus.model.images import context_layout, images_of, with_virtual_ids
from ludus.model.probes import use_ludus_attention
from ludus.remote.limits import queueing

T = TypeVar("T")

# The thread ends after this long without work; the next call starts another.
_IDLE_SECONDS = 2.0
_EXIT_SECONDS = 10.0


class EngineThread:
    """Runs commands in order, and `step` again and again for as long as it says there is work.

    `step` returns whether there is more to do; `rest` is called whenever stepping ends for now. Every
    future is resolved: by the command that got it, or with an error when the thread closes or breaks.
    """

    def __init__(self, step: Callable[[], bool], rest: Callable[[], None]) -> None:
        self._step, self._rest = step, rest
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self.outbox = Outbox()
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
                self.outbox.unresolved.add(reply_future)
            self._inbox.append(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ludus-engine", daemon=True)
                self._thread.start()
            self._condition.notify()

    def check_open(self) -> None:
        """Raise if the engine is closed or has stopped."""
        if self.closed is not None:
            raise copy_of(self.closed)

    async def call(self, command: Callable[[], T]) -> T:
        """Run `command` on the thread, between steps, and return its result."""
        reply_future = ReplyFuture()

        def answer() -> None:
            try:
                outcome: object = command()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                outcome = error
            self.outbox.reply(reply_future, outcome)

        self.post(answer, reply_future)
        result: T = await reply_future.future
        return result

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
        self.outbox.deliver()
        return True

    def _stop(self, error: EngineError | None) -> None:
        """The thread's last act, under the lock."""
        self._rest()
        self._thread = None
        if error is not None:
            self._fail_all(error)

    def _fail_all(self, error: EngineError) -> None:
        self._inbox.clear()
        self.outbox.fail_all(error)


_living: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """A daemon thread that is inside the model while the interpreter goes down can crash it."""
    for engine in list(_living):
        thread = engine.close(EngineError("the interpreter is shutting down", retriable=False))
        if thread is not None:
            thread.join(_EXIT_SECONDS)


class EmbeddedEngine(Engine):
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
        self._images = images_of(model)
        self._core = EngineCore(
            model,
            blocks=cache_blocks(model, self.config),
            block_size=self.config.block_size,
            max_running=self.config.max_running,
            tokens_per_step=max_step_tokens(model, self.config),
            version=version,
            slots=state_slots(model, self.config),
        )
        self._admission = AdmissionQueue(self.config.max_waiting)
        self._thread = EngineThread(self._step, self._rest)
        self._mode = ExitStack()
        self._is_sampling = False

    @classmethod
    def of_run(cls, setup: EngineSetup) -> EmbeddedEngine:
        """The engine of a run that samples in the trainer's process."""
        return cls(setup.model, setup.tokenizer, setup.config, version=setup.version)

    @property
    def policy_version(self) -> int:
        return self._core.version

    @property
    def shares_weights(self) -> bool:
        return True

    @property
    def takes_images(self) -> bool:
        return self._images is not None

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
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        arrived = time.perf_counter()
        context, keyed, layout = await self._read(tokens, media)
        limit, stop_checker = self._limit(len(context), sampling), StopChecker.of(sampling, self._decode)
        with queueing() as wait:
            if not await self._admission.enter(session):
                self._thread.check_open()
                return Completion([], [], FinishReason.ABORTED, (VersionSpan(0, self.policy_version),))
            seen: Marks | None = None
            if sampling.repetition_penalty != 1:
                seen = np.zeros(self._vocabulary, dtype=np.bool_)
                seen[context] = True
            reply_future = ReplyFuture()
            request = Request(
                tokens=keyed,
                prompt=len(context),
                limit=limit,
                sampling=sampling,
                images=tuple(media),
                layout=layout,
                session=session,
                reply=partial(self._thread.outbox.reply, reply_future),
                leave_queue=partial(self._admission.leave, wait, reply_future.loop),
                arrived=arrived,
                stop_tokens=frozenset(sampling.stop_tokens),
                stop_checker=stop_checker,
                seen=seen,
            )
            stream = None if on_tokens is None else TokenStream(reply_future, keyed, on_tokens)
            completion: Completion = await self._run(request, reply_future, stream)
            return completion

    async def score(self, tokens: Sequence[int], *, media: Sequence[MediaSpan] = ()) -> list[float]:
        context, keyed, layout = await self._read(tokens, media)
        reply_future = ReplyFuture()
        request = Request(
            tokens=keyed,
            prompt=len(context),
            limit=self._limit(len(context), None),
            images=tuple(media),
            layout=layout,
            placeholder=self._images.placeholder if self._images is not None else 0,
            sampling=Sampling(),
            is_score=True,
            reply=partial(self._thread.outbox.reply, reply_future),
        )
        logprobs: list[float] = await self._run(request, reply_future)
        return logprobs

    async def _run(
        self, request: Request, reply_future: ReplyFuture, stream: TokenStream | None = None
    ) -> Any:
        """Post a request to the thread and wait for its outcome; a cancelled caller cancels the request."""

        def submit() -> None:
            self._core.submit(request)
            if stream is not None:
                self._thread.outbox.streams.append(stream)

        try:
            self._thread.post(submit, reply_future)
        except EngineError:
            request.started()
            raise
        try:
            return await reply_future.future
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
        def pause() -> None:
            self._core.drain()
            if releases_memory(self.model, self.config):
                self._core.release_memory()
            self._thread.set_paused(True)

        await self._thread.call(pause)

    async def resume(self) -> None:
        def resume() -> None:
            self._core.refresh()
            self._thread.set_paused(False)

        await self._thread.call(resume)

    async def update_weights(self, count: int = 1) -> int:
        keeps = self.config.keep_kv
        return await self._thread.call(
            lambda: self._core.update_weights(self._core.version + count, keep_kv=keeps)
        )

    async def replace_weights(self, copy: Callable[[], None], version: int) -> None:
        """Call `copy`, which changes the weights in place, between two steps; the policy then has `version`.

        This is for an engine that has its model to itself.
        """
        keeps = self.config.keep_kv

        def replace() -> None:
            self._core.drain()
            copy()
            self._core.update_weights(version, keep_kv=keeps)

        await self._thread.call(replace)

    async def forget(self) -> None:
        """Drop the KV cache and all sessions; the policy version stays."""
        await self._thread.call(self._core.forget)

    async def close(self) -> None:
        thread = self._thread.close(EngineError("the engine is closed", retriable=False))
        self._admission.cancel()
        if thread is not None:
            await asyncio.to_thread(thread.join)
        self._core.close()

    def _step(self) -> bool:
        """On the thread: one step if there is work; whether there is more."""
        if not self._core.has_work:
            return False
        if not self._is_sampling:
            self._mode.enter_context(sampling_mode(self.model))
            self._is_sampling = True
        self._core.step()
        if self._thread.outbox.streams:
            self._thread.outbox.report_tokens()
        return self._core.has_work

    def _rest(self) -> None:
        """On the thread: restore the module's training mode."""
        self._mode.close()
        self._is_sampling = False

    async def _read(
        self, tokens: Sequence[int], media: Sequence[MediaSpan]
    ) -> tuple[list[int], list[int], ContextLayout | None]:
        """The context, with virtual ids where images are read, and its layout; decoded in a thread."""
        self._thread.check_open()
        context: list[int] = checked_context(tokens, self._vocabulary).tolist()
        if not media:
            return context, context, None
        images = self._images
        if images is None:
            raise EngineError(
                f"{type(unwrapped(self.model)).__name__} reads text only here, not images (docs/images.md)",
                retriable=False,
            )

        def read() -> tuple[list[int], ContextLayout | None]:
            keyed = with_virtual_ids(context, media, images)
            return keyed, context_layout(self.model, len(context), media, images)

        try:
            return context, *await asyncio.to_thread(read)
        except (LudusError, ValueError) as error:
            raise EngineError(f"an image cannot be shown: {error}", retriable=False) from error

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
