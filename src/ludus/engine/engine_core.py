"""The engine without its async front: requests in, replies out, one step at a time.

Everything here runs on one thread. On a GPU one step is under way while the next is planned and launched, so
that the device never waits for the host: `step` launches a step and then collects the one before it. On a
CPU a step is collected at once. Whatever must see the state of all requests (a pause, new weights, a failure)
collects what is under way first. A step that raises fails the requests that were part of it and drops all KV;
the engine stays usable.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from ludus.core.failures import Aborted, EngineError
from ludus.core.generation import FinishReason
from ludus.engine.block_manager import KvBooks
from ludus.engine.config import EngineStats as EngineStats
from ludus.engine.cuda.runner import runner_for
from ludus.engine.model_runner import Pending, Results
from ludus.engine.scheduler import Chunk, Request, Scheduler

_log = logging.getLogger(__name__)


class Worker:
    """Scheduler, cache and model, driven by whoever calls `step`.

    `is_static` and `lookahead` are by default what the model's device is best served with: steps over static
    buffers with one under way on a GPU, gathered pages and none on a CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pages: int,
        page_size: int,
        max_running: int,
        tokens_per_step: int,
        version: int = 0,
        is_static: bool | None = None,
        lookahead: int | None = None,
    ) -> None:
        self.stats = EngineStats()
        self.version = version
        self._runner, self._store = runner_for(
            model, pages, page_size, max_running, self.stats, is_static, lookahead
        )
        self._books = KvBooks(pages, page_size, self._store.copy_page)
        self._books.set_version(version)
        self.scheduler = Scheduler(self._books, max_running, tokens_per_step)
        self._under_way: deque[Pending] = deque()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._under_way)

    @property
    def room(self) -> int:
        """How many tokens the cache holds."""
        return self._books.ledger.pages * self._books.page_size

    def submit(self, request: Request) -> None:
        request.note_version(self.version)
        self.stats.requests += 1
        if request.is_score and len(request.tokens) == 1:
            request.reply([0.0])
            return
        try:
            self.scheduler.add(request)
        except EngineError as error:
            request.started()
            request.reply(error)

    def cancel(self, request: Request) -> None:
        """Nobody waits for it any more; one that has finished meanwhile is left alone."""
        if not request.is_done and (request.row >= 0 or request in self.scheduler.waiting):
            self.scheduler.finish(request)
            request.reply(Aborted("the caller was cancelled"))

    def close(self) -> None:
        """Give all memory back."""
        self._under_way.clear()
        self._runner.close()
        self._store.free()

    def refresh(self) -> None:
        """Somebody else has had the model: whatever depends on where its weights lie is checked."""
        self._runner.refresh()

    def abort(self, session: str) -> None:
        """Reply to the session's request with what there is."""
        request = self.scheduler.active.get(session)
        if request is not None:
            self.finish(request, FinishReason.ABORTED)

    def update_weights(self) -> int:
        self.drain()
        self.version += 1
        self.forget()
        self._runner.refresh()
        for request in self.scheduler.waiting:
            request.note_version(self.version)
        return self.version

    def forget(self) -> None:
        """Drop all KV; requests on their way recompute theirs."""
        self.drain()
        self.scheduler.forget(self.version)

    def hand_back(self) -> None:
        """Give the cache's memory to others until the next step, and all that it held up."""
        if not self._store.is_there:
            return
        started = time.perf_counter()
        self.forget()
        self._store.hand_back()
        self.stats.memory_handed_back += 1
        self.stats.memory_seconds += time.perf_counter() - started

    def step(self) -> None:
        """Launch the next chunk of everyone who is due, and reply to those who are done."""
        started = time.perf_counter()
        if not self._store.is_there and not self._regain():
            return
        chunks = self.scheduler.plan()
        self.stats.preemptions = self.scheduler.preemptions
        allowed = 0
        if chunks:
            allowed = self._launch(chunks)
        elif not self._under_way:
            raise AssertionError("there are requests, and none of them can go on")
        while len(self._under_way) > allowed:
            self._collect()
        self.stats.busy_seconds += time.perf_counter() - started

    def drain(self) -> None:
        """Collect every step that is under way."""
        while self._under_way:
            self._collect()

    def _launch(self, chunks: list[Chunk]) -> int:
        """Begin a step; how many may be under way now."""
        try:
            with torch.no_grad():
                pending = self._runner.launch(
                    chunks, self.scheduler.tables, self._books.ledger.high_water
                )
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails its requests, not us
            if not isinstance(error, torch.OutOfMemoryError) or not self._shrink(chunks):
                self._fail_step(chunks, error)
            return 0
        self._under_way.append(pending)
        self.stats.steps += 1
        for chunk in chunks:
            self.stats.computed_tokens += chunk.stop - chunk.start
        return 0 if pending.is_urgent else self._runner.lookahead

    def _shrink(self, chunks: Sequence[Chunk]) -> bool:
        """A step found no memory: everybody begins anew with half the cache. False if there is no half."""
        self.drain()
        for chunk in chunks:
            chunk.request.promised = 0
        self.scheduler.forget(self.version)
        if not self._store.halve():
            return False
        _log.warning(
            "a step ran out of memory: the KV cache goes on with half of its %d tokens; a lower engine.memory "
            "(or engine.cache_tokens) avoids this",
            self.room,
        )
        return True

    def _collect(self) -> None:
        """Take in the results of the oldest step that is under way."""
        pending = self._under_way.popleft()
        try:
            results = pending.result()
        except Exception as error:  # noqa: BLE001 - as above: a device reports late what went wrong
            self._fail_step(pending.chunks, error)
            return
        self._accept(results)
        for chunk, values in results.scores:
            self._take_scores(chunk, values)

    def _accept(self, results: Results) -> None:
        unsound: list[Request] = []
        accepted = 0
        for chunk, token, logprob, is_sound in zip(
            results.sampled, results.tokens, results.logprobs, results.sound, strict=True
        ):
            request = chunk.request
            request.promised -= 1
            if request.is_done:
                self.stats.wasted_tokens += 1
                continue
            if not is_sound:
                unsound.append(request)
                continue
            accepted += 1
            try:
                finished = request.accept(token, logprob)
            except Exception as error:  # noqa: BLE001 - a tokenizer's fault fails its own request
                self._fail(request, "looking for stop strings", error)
                continue
            if finished is not None:
                self.finish(request, *finished)
        self.stats.generated_tokens += accepted
        if unsound:
            self._discard(unsound)

    def _discard(self, unsound: list[Request]) -> None:
        """NaN spreads through shared pages: everybody else recomputes, in a clean cache."""
        self.drain()
        for request in unsound:
            if not request.is_done:
                self.scheduler.finish(request)
                request.reply(
                    EngineError("the model's logits are not finite: its weights diverged or overflow")
                )
        self.scheduler.forget(self.version)
        self._store.clear()

    def _take_scores(self, chunk: Chunk, values: list[float]) -> None:
        request = chunk.request
        if request.is_done:
            return
        if chunk.start == 0:
            request.logprobs = [0.0]
        request.logprobs += values
        if chunk.stop == len(request.tokens):
            self.scheduler.finish(request)
            request.reply(list(request.logprobs))

    def finish(self, request: Request, reason: FinishReason, stop: str | None = None) -> None:
        """Take a request out and reply with what there is."""
        self.scheduler.finish(request)
        self.stats.cached_tokens += request.cached_tokens or 0
        request.reply(request.completion(reason, stop))

    def _fail_step(self, chunks: Sequence[Chunk], cause: Exception) -> None:
        """The step broke: what its pages hold cannot be trusted."""
        self.drain()
        self.stats.failed_steps += 1
        for chunk in chunks:
            chunk.request.promised = 0  # nothing is under way any more
            if not chunk.request.is_done:
                self._fail(chunk.request, "a step of the model", cause)
        self.scheduler.forget(self.version)
        self._store.clear()

    def _fail(self, request: Request, what: str, cause: Exception) -> None:
        error = EngineError(f"{what} raised {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self.scheduler.finish(request)
        request.reply(error)

    def _regain(self) -> bool:
        """Have the cache's memory again; whoever does not fit into less of it is told."""
        started = time.perf_counter()
        try:
            pages = self._store.regain()
        except Exception as error:  # noqa: BLE001 - without memory nobody can be served now
            for request in list(self.scheduler.waiting):
                self._fail(request, "finding memory for the KV cache", error)
            return False
        if pages != self._books.ledger.pages:
            self._books.resize(pages)
        self._runner.refresh()
        for request in [r for r in self.scheduler.waiting if r.limit > self.room]:
            cause = MemoryError(f"{request.limit} tokens do not fit into the {self.room} that are left")
            self._fail(request, "finding memory for the KV cache", cause)
        self.stats.memory_seconds += time.perf_counter() - started
        return self.has_work
