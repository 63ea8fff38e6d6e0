"""The engine that samples the very module that is trained.

Who waits for whom: callers live on event loops, the model on one thread of its own. A caller hands its
request to the thread and awaits a future; the thread takes in what has arrived, runs a step, and
delivers what is finished, with one wake-up per step and loop. Everything that touches the scheduler runs
on the thread, between steps, in the order it was asked for. `max_waiting` bounds the queue: callers
beyond it wait at a turnstile. The thread ends when there has been nothing to do for a while and starts
again with the next request, so that a forgotten engine leaves none behind. On a GPU a step is launched while
the one before it runs (see `worker`); a pause, new weights and a closing engine wait for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from torch import nn

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, FinishReason, Sampling, VersionSpan
from ludus.core.messages import Media
from ludus.core.tokenizer import Tokenizer
from ludus.engine.adopt import use_ludus_attention
from ludus.engine.backbone import context_limit, sampling_mode, vocabulary_size
from ludus.engine.config import EngineConfig
from ludus.engine.memory import cache_pages, hands_back, step_tokens
from ludus.engine.requests import Marks, Request
from ludus.engine.stopping import Decode, StopWatcher
from ludus.engine.thread import EngineThread, Mailbox
from ludus.engine.turnstile import Turnstile
from ludus.engine.worker import EngineStats, Worker


class EmbeddedEngine:
    """An `Engine` over a Hugging Face causal LM, which it shares with whoever trains it.

    `decode` is needed for stop strings only: a tokenizer, or a function from tokens to text. The trainer
    calls `pause` before it touches the weights, then `update_weights` and `resume`. `version` is the policy
    version that the first update counts on from.
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
        self._worker = Worker(
            model,
            pages=cache_pages(model, self.config),
            page_size=self.config.page_size,
            max_running=self.config.max_running,
            tokens_per_step=step_tokens(model, self.config),
            version=version,
        )
        self._turnstile = Turnstile(self.config.max_waiting)
        self._thread = EngineThread(self._step, self._rest)
        self._mode = ExitStack()
        self._is_sampling = False

    @property
    def policy_version(self) -> int:
        return self._worker.version

    @property
    def stats(self) -> EngineStats:
        """Counters for metrics; they grow while the engine works."""
        return self._worker.stats

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
        watcher = self._watcher(sampling)
        if not await self._turnstile.enter(session):
            self._thread.check_open()
            versions = (VersionSpan(0, self.policy_version),)
            return Completion([], [], FinishReason.ABORTED, versions)
        mailbox = Mailbox()
        request = Request(
            tokens=context,
            prompt=len(context),
            limit=limit,
            sampling=sampling,
            session=session,
            reply=lambda outcome: self._thread.reply(mailbox, outcome),
            leave_queue=self._turnstile.leave,
            stop_tokens=frozenset(sampling.stop_tokens),
            watcher=watcher,
            seen=self._seen(context, sampling),
        )
        await self._run(request, mailbox)
        result: Completion = mailbox.future.result()
        return result

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        context = self._checked(tokens)
        sampling = Sampling(temperature=temperature)
        self._limit(len(context), None)
        mailbox = Mailbox()
        request = Request(
            tokens=context,
            prompt=len(context),
            limit=len(context),
            sampling=sampling,
            is_score=True,
            reply=lambda outcome: self._thread.reply(mailbox, outcome),
        )
        await self._run(request, mailbox)
        result: list[float] = mailbox.future.result()
        return result

    async def _run(self, request: Request, mailbox: Mailbox) -> None:
        """Hand a request over and wait for its outcome; a cancelled caller takes it back."""
        try:
            self._thread.post(lambda: self._worker.submit(request), mailbox)
        except EngineError:
            request.started()
            raise
        try:
            await mailbox.future
        except asyncio.CancelledError:
            if self._thread.closed is None:
                self._thread.post(lambda: self._worker.cancel(request))
            raise

    async def fork(self, session: str, into: str) -> None:
        await self._thread.call(lambda: self._worker.scheduler.fork(session, into))

    async def release(self, session: str) -> None:
        if self._thread.closed is None:
            await self._thread.call(lambda: self._worker.scheduler.release(session))

    async def abort(self, session: str) -> None:
        self._turnstile.expel(session)
        if self._thread.closed is None:
            await self._thread.call(lambda: self._worker.abort(session))

    async def pause(self) -> None:
        await self._thread.call(self._pause)

    async def resume(self) -> None:
        await self._thread.call(self._resume)

    async def update_weights(self) -> int:
        return await self._thread.call(self._worker.update_weights)

    async def forget(self) -> None:
        """Drop all that was computed for earlier contexts; the policy version stays."""
        await self._thread.call(self._worker.forget)

    async def close(self) -> None:
        thread = self._thread.close(EngineError("the engine is closed", retriable=False))
        self._turnstile.expel()
        if thread is not None:
            await asyncio.to_thread(thread.join)
        self._worker.close()

    def _pause(self) -> None:
        """On the thread: nothing is under way afterwards."""
        self._worker.drain()
        if hands_back(self.model, self.config):
            self._worker.hand_back()
        self._thread.set_paused(True)

    def _resume(self) -> None:
        self._worker.refresh()
        self._thread.set_paused(False)

    def _step(self) -> bool:
        """On the thread: one step if there is work; whether there is more."""
        if not self._worker.has_work:
            return False
        if not self._is_sampling:
            self._mode.enter_context(sampling_mode(self.model))
            self._is_sampling = True
        self._worker.step()
        return self._worker.has_work

    def _rest(self) -> None:
        """On the thread: give the module back in the mode it was found in."""
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
        """How many tokens a request may have in all; an error when it can never be served."""
        ceiling = self._context or prompt + (sampling.max_tokens if sampling else 0)
        if prompt > ceiling or (sampling and prompt == ceiling):
            raise EngineError(
                f"the context has {prompt} tokens and the model's limit (max_position_embeddings) is "
                f"{ceiling}: nothing can follow",
                retriable=False,
            )
        limit = min(ceiling, prompt + sampling.max_tokens) if sampling else prompt
        room = self._worker.room
        if limit > room:
            raise EngineError(
                f"a request of up to {limit} tokens can never fit into the KV cache of {room}: raise "
                "engine.cache_tokens or engine.memory, or lower budgets.max_turn_tokens or budgets.max_tokens",
                retriable=False,
            )
        return limit

    def _watcher(self, sampling: Sampling) -> StopWatcher | None:
        if not sampling.stop:
            return None
        if self._decode is None:
            raise EngineError(
                "stop strings need a tokenizer: EmbeddedEngine(model, tokenizer)", retriable=False
            )
        return StopWatcher(sampling.stop, self._decode)

    def _seen(self, context: list[int], sampling: Sampling) -> Marks | None:
        if sampling.repetition_penalty == 1:
            return None
        seen = np.zeros(self._vocabulary, dtype=np.bool_)
        seen[context] = True
        return seen
