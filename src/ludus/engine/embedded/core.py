"""The engine without its async front: requests in, replies out, one step at a time.

Everything here runs on one thread. On a GPU one step is in flight while the next is scheduled and launched, so
that the device never waits for the host: `step` launches a step, then collects the one before it. On a CPU a
step is collected at once. What must see the state of all requests (a pause, new weights, a failure) first
collects the steps in flight. A step that raises fails the requests that were part of it and drops all KV; the
engine stays usable. A row that cannot be sampled, or whose logits are not finite, fails alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from ludus.core.failures import Aborted, ConfigError, EngineError
from ludus.core.generation import FinishReason
from ludus.engine.config import EngineConfig, EngineStats
from ludus.engine.embedded.block_manager import BlockManager
from ludus.engine.embedded.paged_attention import TorchKVCache
from ludus.engine.embedded.request import Chunk, Request
from ludus.engine.embedded.runner import PendingStep, make_runner
from ludus.engine.embedded.scheduler import Scheduler
from ludus.engine.embedded.state_cache import StateBlockManager
from ludus.kernels.device import all_memory, free_memory
from ludus.model.hf_model import context_limit, device_of
from ludus.model.kv_layers import kv_layers, state_shapes
from ludus.model.state_layers import state_bytes

_log = logging.getLogger(__name__)

_WITHOUT_LIMIT = 32768
"""Tokens of a context, where the model has no limit."""
_SLOTS = 4
"""Recurrent states for each request that runs: its own, those of idle sessions, and snapshots."""
_PLENTY = 0.4
"""With less of a GPU free, a trainer gets the cache's memory while the engine pauses."""


class EngineCore:
    """Scheduler, KV cache and model runner, driven by calls of `step`.

    `is_static` and `lookahead` default to what suits the model's device: static buffers with one step in flight
    on a GPU, gathered blocks and no step in flight on a CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        blocks: int,
        block_size: int,
        max_running: int,
        tokens_per_step: int,
        version: int = 0,
        is_static: bool | None = None,
        lookahead: int | None = None,
        slots: int | None = None,
    ) -> None:
        """`slots` are for the recurrent states of a model that has such: several for each running request."""
        self.stats = EngineStats()
        self.version = version
        slots = _SLOTS * max_running if slots is None else slots
        self._runner, self._kv_cache = make_runner(
            model, blocks, block_size, max_running, self.stats, is_static, lookahead, slots
        )
        copy_block = self._kv_cache.copy_block
        self._block_manager = BlockManager(blocks, block_size, copy_block)
        if isinstance(self._kv_cache, TorchKVCache) and self._kv_cache.states is not None:
            self._block_manager = StateBlockManager(
                blocks, block_size, copy_block, self._kv_cache.states
            )
        self._block_manager.set_version(version)
        self.scheduler = Scheduler(self._block_manager, max_running, tokens_per_step)
        self._in_flight: deque[PendingStep] = deque()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def room(self) -> int:
        """How many tokens the cache holds."""
        return self._block_manager.pool.blocks * self._block_manager.block_size

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
        """Drop a request whose caller is gone, unless it has finished meanwhile."""
        if not request.is_done and (request.row >= 0 or request in self.scheduler.waiting):
            self.scheduler.finish(request)
            request.reply(Aborted("the caller was cancelled"))

    def close(self) -> None:
        """Give all memory back."""
        self._in_flight.clear()
        self._runner.close()
        self._kv_cache.free()

    def refresh(self) -> None:
        """The trainer has had the model: check what depends on the addresses of its weights."""
        self._runner.refresh()

    def abort(self, session: str) -> None:
        """Reply to the session's request with what there is."""
        request = self.scheduler.active.get(session)
        if request is not None:
            self.finish(request, FinishReason.ABORTED)

    def update_weights(self, version: int | None = None, *, keep_kv: bool = False) -> int:
        """The weights have changed. Requests in flight recompute their KV, or keep that of older weights.

        The version is one more than before when left out.
        """
        self.drain()
        self.version = self.version + 1 if version is None else version
        if keep_kv:
            self.scheduler.block_manager.set_version(self.version)  # no other request finds it
        else:
            self.forget()
        self._runner.refresh()
        for request in (*self.scheduler.waiting, *self.scheduler.running):
            request.note_version(self.version)
        return self.version

    def forget(self) -> None:
        """Drop all KV; requests in flight recompute theirs."""
        self.drain()
        self.scheduler.forget(self.version)

    def release_memory(self) -> None:
        """Give the cache's memory to others until the next step, and all that it held up."""
        if not self._kv_cache.is_allocated:
            return
        started = time.perf_counter()
        self.forget()
        self._kv_cache.release()
        self.stats.memory_handed_back += 1
        self.stats.memory_seconds += time.perf_counter() - started

    def step(self) -> None:
        """Launch the next step and collect the one before it; reply to the requests that are done."""
        started = time.perf_counter()
        if not self._kv_cache.is_allocated and not self._reacquire():
            return
        chunks = self.scheduler.plan()
        self.stats.preemptions = self.scheduler.preemptions
        allowed = 0
        if chunks:
            allowed = self._launch(chunks)
        elif not self._in_flight:
            raise AssertionError("there are requests, and none of them can go on")
        while len(self._in_flight) > allowed:
            self._collect()
        self.stats.busy_seconds += time.perf_counter() - started

    def drain(self) -> None:
        """Collect every step in flight."""
        while self._in_flight:
            self._collect()

    def _launch(self, chunks: list[Chunk]) -> int:
        """Launch a step; how many may be in flight now."""
        try:
            with torch.no_grad():
                pending = self._runner.launch(
                    chunks, self.scheduler.block_tables, self._block_manager.pool.high_water
                )
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails its requests, not us
            if not isinstance(error, torch.OutOfMemoryError) or not self._shrink(chunks):
                self._fail_step(chunks, error)
            return 0
        self._in_flight.append(pending)
        self.stats.steps += 1
        for chunk in chunks:
            self.stats.computed_tokens += chunk.stop - chunk.start
        return 0 if pending.is_urgent else self._runner.lookahead

    def _shrink(self, chunks: Sequence[Chunk]) -> bool:
        """A step ran out of memory: halve the KV cache and recompute. False if it cannot be halved."""
        self.drain()
        for chunk in chunks:
            chunk.request.in_flight = 0
        self.scheduler.forget(self.version)
        if not self._kv_cache.halve():
            return False
        _log.warning(
            "a step ran out of memory: the KV cache shrinks to half of its %d tokens; a lower engine.memory "
            "(or engine.cache_tokens) avoids this",
            self.room,
        )
        return True

    def _collect(self) -> None:
        """Take in the results of the oldest step in flight."""
        pending = self._in_flight.popleft()
        try:
            results = pending.result()
        except Exception as error:  # noqa: BLE001 - as above: a device reports late what went wrong
            self._fail_step(pending.chunks, error)
            return
        not_finite: list[Request] = []
        accepted = 0
        for chunk, token, logprob, is_finite in zip(
            results.sampled, results.tokens, results.logprobs, results.finite, strict=True
        ):
            request = chunk.request
            request.in_flight -= 1
            if request.is_done:
                self.stats.wasted_tokens += 1
                continue
            if request.failure is not None:
                self._fail(request, "sampling a token", request.failure)
                continue
            if not is_finite:
                not_finite.append(request)
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
        if (
            not_finite
        ):  # NaN spreads through shared blocks: all other requests recompute, in a cleared cache
            self.drain()
            for request in not_finite:
                if not request.is_done:
                    self.scheduler.finish(request)
                    request.reply(
                        EngineError(
                            "the model's logits are not finite: its weights diverged or overflow"
                        )
                    )
            self.scheduler.forget(self.version)
            self._kv_cache.clear()
        for chunk, values in results.scores:
            request = chunk.request
            if request.is_done:
                continue
            request.logprobs = [*(request.logprobs if chunk.start else [0.0]), *values]
            if chunk.stop == len(request.tokens):
                self.scheduler.finish(request)
                request.reply(list(request.logprobs))

    def finish(self, request: Request, reason: FinishReason, stop: str | None = None) -> None:
        """Finish a request and reply with what it has generated."""
        self.scheduler.finish(request)
        self.stats.cached_tokens += request.cached_tokens or 0
        request.reply(request.completion(reason, stop))

    def _fail_step(self, chunks: Sequence[Chunk], cause: Exception) -> None:
        """Fail the requests of a step that raised; its blocks cannot be trusted."""
        self.drain()
        self.stats.failed_steps += 1
        for chunk in chunks:
            chunk.request.in_flight = 0  # nothing is in flight any more
            if not chunk.request.is_done:
                self._fail(chunk.request, "a step of the model", cause)
        self.scheduler.forget(self.version)
        self._kv_cache.clear()

    def _fail(self, request: Request, what: str, cause: Exception) -> None:
        error = EngineError(f"{what} raised {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self.scheduler.finish(request)
        request.reply(error)

    def _reacquire(self) -> bool:
        """Allocate the KV cache again; fail the requests that no longer fit. Whether there is work left."""
        started = time.perf_counter()
        try:
            blocks = self._kv_cache.acquire()
        except Exception as error:  # noqa: BLE001 - without memory no request can be served now
            for request in list(self.scheduler.waiting):
                self._fail(request, "finding memory for the KV cache", error)
            return False
        if blocks != self._block_manager.pool.blocks:
            self._block_manager.resize(blocks)
        self._runner.refresh()
        for request in [r for r in self.scheduler.waiting if r.limit > self.room]:
            cause = MemoryError(f"{request.limit} tokens do not fit into the {self.room} that are left")
            self._fail(request, "finding memory for the KV cache", cause)
        self.stats.memory_seconds += time.perf_counter() - started
        return self.has_work


def cache_blocks(model: nn.Module, config: EngineConfig) -> int:
    """Size of the KV cache in blocks: as configured, or what full batches need, within a share of memory."""
    tokens = config.cache_tokens
    if tokens is None:
        memory = _cache_memory(model, config)
        memory -= state_slots(model, config) * state_bytes(state_shapes(model))
        token_bytes = sum(layer.token_bytes for layer in kv_layers(model)[0].values())
        wanted = config.max_running * (context_limit(model) or _WITHOUT_LIMIT)
        tokens = min(wanted, int(memory / max(1, token_bytes)))
    return max(1, -(-tokens // config.block_size))


def state_slots(model: nn.Module, config: EngineConfig) -> int:
    """How many recurrent states are kept: several for each running request, in half of the cache's memory."""
    shapes = state_shapes(model)
    if not shapes:
        return 0
    memory, size = _cache_memory(model, config), state_bytes(shapes)
    slots = min(_SLOTS * config.max_running, int(0.5 * memory / size))
    if slots < 2:
        raise ConfigError(
            f"the recurrent states of one request take {size / 2**20:.0f} MiB, and half of the cache's memory "
            f"({memory / 2**20:.0f} MiB) must hold two of them: raise engine.memory"
        )
    return slots


def _cache_memory(model: nn.Module, config: EngineConfig) -> float:
    """Bytes that the cache may take."""
    device = device_of(model)
    if device.type == "cuda":
        return (config.memory or 0.4) * torch.cuda.mem_get_info(device)[0]
    return (config.memory or 0.125) * all_memory(device)


def max_step_tokens(model: nn.Module, config: EngineConfig) -> int:
    """Token budget of a step: as configured, or what suits the device."""
    if config.tokens_per_step is not None:
        return config.tokens_per_step
    return max(config.max_running, 8192 if device_of(model).type == "cuda" else 2048)


def releases_memory(model: nn.Module, config: EngineConfig) -> bool:
    """Whether a pause that begins now gives the KV cache's memory to the trainer."""
    device = device_of(model)
    if config.keep_kv:
        return False
    if config.release_memory != "auto" or device.type != "cuda":
        return config.release_memory == "always"
    free, total = free_memory(device)
    return free < _PLENTY * total
