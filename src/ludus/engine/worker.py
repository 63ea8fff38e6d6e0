"""The engine without its async front: requests in, replies out, one step at a time.

Everything here runs on one thread. A step that raises fails the requests that were part of it and drops
all KV; the engine stays usable.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ludus.core.failures import Aborted, EngineError
from ludus.core.generation import FinishReason
from ludus.engine.kv import KvBooks
from ludus.engine.requests import Request
from ludus.engine.runner import Runner, Sampled
from ludus.engine.scheduler import Chunk, Scheduler
from ludus.engine.store import KvStore


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made."""

    requests: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, prompts and generated ones alike."""
    cached_tokens: int = 0
    """Tokens of contexts whose KV was found instead of computed."""
    steps: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    busy_seconds: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


class Worker:
    """Scheduler, cache and model, driven by whoever calls `step`."""

    def __init__(
        self, model: nn.Module, *, pages: int, page_size: int, max_running: int, tokens_per_step: int
    ) -> None:
        self._store = KvStore(pages, page_size)
        self._books = KvBooks(pages, page_size, self._store.copy_page)
        self._runner = Runner(model, self._store)
        self.scheduler = Scheduler(self._books, max_running, tokens_per_step)
        self.stats = EngineStats()
        self.version = 0

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
        if request.row >= 0 or request in self.scheduler.waiting:
            self.scheduler.finish(request)
            request.reply(Aborted("the caller was cancelled"))

    def close(self) -> None:
        """Give the cache's memory back."""
        self._store.free()

    def abort(self, session: str) -> None:
        """Reply to the session's request with what there is."""
        request = self.scheduler.active.get(session)
        if request is not None:
            self.finish(request, FinishReason.ABORTED)

    def update_weights(self) -> int:
        self.version += 1
        self.scheduler.forget(self.version)
        for request in self.scheduler.waiting:
            request.note_version(self.version)
        return self.version

    def step(self) -> None:
        """Compute the next chunk of everyone who is due, and reply to those who are done."""
        started = time.perf_counter()
        chunks = self.scheduler.plan()
        if not chunks:
            raise AssertionError("there are requests, and none of them can go on")
        self.stats.preemptions = self.scheduler.preemptions
        try:
            with torch.no_grad():
                sampled, scores = self._runner.step(
                    chunks, self.scheduler.tables, self._books.ledger.high_water
                )
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails its requests, not us
            self._fail_step(chunks, error)
            return
        self.stats.steps += 1
        for chunk in chunks:
            self.stats.computed_tokens += chunk.stop - chunk.start
        self._accept(sampled)
        for chunk, values in scores:
            self._collect(chunk, values)
        self.stats.busy_seconds += time.perf_counter() - started

    def _accept(self, sampled: list[Sampled]) -> None:
        unsound: list[Request] = []
        for item in sampled:
            request = item.chunk.request
            if not item.is_sound:
                unsound.append(request)
                continue
            try:
                finished = request.accept(item.token, item.logprob)
            except Exception as error:  # noqa: BLE001 - a tokenizer's fault fails its own request
                self._fail(request, "looking for stop strings", error)
                continue
            if finished is not None:
                self.finish(request, *finished)
        self.stats.generated_tokens += len(sampled) - len(unsound)
        if unsound:
            self._discard(unsound)

    def _discard(self, unsound: list[Request]) -> None:
        """NaN spreads through shared pages: everybody else recomputes, in a clean cache."""
        for request in unsound:
            self.scheduler.finish(request)
            request.reply(
                EngineError("the model's logits are not finite: its weights diverged or overflow")
            )
        self.scheduler.forget(self.version)
        self._store.clear()

    def _collect(self, chunk: Chunk, values: list[float]) -> None:
        request = chunk.request
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

    def _fail_step(self, chunks: list[Chunk], cause: Exception) -> None:
        """The step broke: what its pages hold cannot be trusted."""
        self.stats.failed_steps += 1
        for chunk in chunks:
            self._fail(chunk.request, "a step of the model", cause)
        self.scheduler.forget(self.version)
        self._store.clear()

    def _fail(self, request: Request, what: str, cause: Exception) -> None:
        error = EngineError(f"{what} raised {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self.scheduler.finish(request)
        request.reply(error)
