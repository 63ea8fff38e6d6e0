"""The CUDA model runner: steps that are launched now and collected later, over static buffers and CUDA graphs.

A step has two parts on one stream: first its prefill, then its decoding rows, both as CUDA graphs unless they
are long. In this order a request that shares the prompt of another one in the same step reads what that one has
just written. Nothing here waits for the device, except where a request samples from a truncated distribution:
its tokens are sampled by plain torch operations, and the step is collected at once.

Double buffering. Device buffers exist once: the stream runs steps one after the other, so a step's inputs may
be overwritten as soon as the copy for the next one is reached. Host buffers (pinned) exist `lookahead + 1`
times, because the host runs ahead of the device:

    host     fill 0, launch A   fill 1, launch B   collect A (wait, read 0)   fill 0, launch C   collect B ...
    stream       [copy 0 in][step A][copy 0 out]   [copy 1 in][step B][copy 1 out]   [copy 0 in] ...

While B runs, the host schedules C; it may fill copy 0 again because A, the last step that used it, was
collected: `EngineCore` never has more than `lookahead` steps in flight when it launches another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.config import EngineStats
from ludus.engine.embedded.cuda.decode import DecodeStep, RowSampling, RowState
from ludus.engine.embedded.cuda.graphs import StepGraphs
from ludus.engine.embedded.cuda.kv_cache import FixedMemory, KVShape, StaticKVCache
from ludus.engine.embedded.cuda.prefill import PrefillStep, StepParts
from ludus.engine.embedded.paged_attention import DecodeContext, PrefillContext
from ludus.engine.embedded.request import Chunk
from ludus.engine.embedded.runner import StepResults, sample_chunks
from ludus.kernels import sample_at_temperature, unavailable
from ludus.kernels.device import on_device
from ludus.model.forward import head_logits, hidden_states, stock_hidden_states
from ludus.model.hf_model import computed_in_float32, device_of, rows_alone, sampling_mode
from ludus.model.image_layout import both_ways, has_rope_index
from ludus.model.images import forget_features
from ludus.model.kv_layers import kv_layers
from ludus.model.packed_attention import PackedContext
from ludus.model.probes import agree_up_to_rounding, probe_tokens
from ludus.model.state_layers import state_layers

Ints = npt.NDArray[np.int64]


class CudaModelRunner:
    """Runs chunks through the model over static buffers."""

    def __init__(
        self,
        model: nn.Module,
        kv_cache: StaticKVCache,
        *,
        rows: int,
        width: int,
        stats: EngineStats,
        lookahead: int,
    ) -> None:
        self.lookahead = lookahead
        self._model, self._kv_cache, self._stats = model, kv_cache, stats
        self._device = device_of(model)
        self._rows = rows
        self._copies = lookahead + 1
        self._copy = 0
        state = RowState(rows, width, self._device)
        self._row_sampling = RowSampling(rows)
        self._graphs = StepGraphs(self._device, stats)
        self._decode = DecodeStep(model, kv_cache, state, self._copies, self._graphs)
        parts = StepParts(model, kv_cache, state, self._decode, self._graphs)
        self._prefill = PrefillStep(parts, self._row_sampling, self._copies)
        self._known: object = None
        self._has_rope_index = has_rope_index(model)

    def launch(self, chunks: Sequence[Chunk], block_tables: Ints, blocks: int) -> InFlightStep:
        """Launch a step, once the step `lookahead + 1` before it has been collected."""
        copy, self._copy = self._copy, (self._copy + 1) % self._copies
        decoding = [chunk for chunk in chunks if chunk.is_decode]
        others = [chunk for chunk in chunks if not chunk.is_decode]
        with on_device(self._device):
            clock = StepTimer(self._device)
            # The order on the stream is the contract: prefill, decode, then results and scores to the host. The
            # clock's last event comes after them, so that waiting for it makes the host's arrays valid.
            scores = self._prefill.launch(copy, others, block_tables) if others else []
            is_urgent = self._launch_decode(copy, decoding, block_tables) if decoding else False
            first = [chunk for chunk in others if chunk.samples]
            is_urgent = is_urgent or any(chunk.request.sampling.is_truncated for chunk in first)
            self._decode.results.fetch(copy)
            kept = [(chunk, _to_host(values)) for chunk, values in scores]
            clock.stop()
        places = slice(0, len(decoding)), slice(self._rows, self._rows + len(first))
        host = self._decode.results.hosts[copy]
        return InFlightStep(chunks, is_urgent, decoding + first, places, host, kept, clock, self._stats)

    def refresh(self) -> None:
        """Drop the graphs if weights, blocks or active adapters have changed."""
        known = (self._kv_cache.count, fingerprint(self._model))
        if known != self._known:
            self._graphs.clear()
            self._known = known
        forget_features(self._model)
        self._prefill.forget_limit()

    def close(self) -> None:
        self._graphs.clear()

    def _launch_decode(self, copy: int, chunks: list[Chunk], block_tables: Ints) -> bool:
        """Launch the decoding part; whether its tokens were sampled on the host already."""
        count = len(chunks)
        rows = np.fromiter([chunk.request.row for chunk in chunks], np.int64, count)
        positions = np.fromiter([chunk.start for chunk in chunks], np.int64, count)
        blocks = block_tables[rows, positions // self._kv_cache.block_size]
        is_truncated = self._row_sampling.has_truncated(rows)
        sampling_inputs = self._row_sampling.at(rows, positions + 1)
        shifts: Ints | None = None
        if self._has_rope_index:
            layouts = [chunk.request.layout for chunk in chunks]
            shifts = np.array([0 if one is None else one.shift for one in layouts])
        logits = self._decode.launch(
            copy, rows, positions, blocks, sampling_inputs, is_truncated, shifts
        )
        if logits is not None:
            self._decode.store_host(0, rows, sample_chunks(logits, chunks))
        return is_truncated


class InFlightStep:
    """A launched step and where its results will be."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        is_urgent: bool,
        sampled: list[Chunk],
        places: tuple[slice, slice],
        host: dict[str, npt.NDArray[Any]],
        scores: list[tuple[Chunk, Tensor]],
        clock: StepTimer,
        stats: EngineStats,
    ) -> None:
        self.chunks = chunks
        self.is_urgent = is_urgent
        self._sampled, self._places, self._host = sampled, places, host
        self._scores, self._clock, self._stats = scores, clock, stats

    def result(self) -> StepResults:
        self._stats.gpu_seconds += self._clock.wait()
        columns = [
            [value for place in self._places for value in self._host[name][place].tolist()]
            for name in ("tokens", "logprobs", "finite")
        ]
        scores = [(chunk, values.tolist()) for chunk, values in self._scores]
        return StepResults(self._sampled, columns[0], columns[1], columns[2], scores)


class StepTimer:
    """Seconds from a step's first operation on the device to its last; 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[Any] = []
        if device.type == "cuda":
            event: Any = torch.cuda.Event
            self._events = [event(enable_timing=True), event(enable_timing=True)]
            self._events[0].record()

    def stop(self) -> None:
        if self._events:
            self._events[1].record()

    def wait(self) -> float:
        """Wait for the last operation; the seconds between the two."""
        if not self._events:
            return 0.0
        first, last = self._events
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def fingerprint(model: nn.Module) -> object:
    """Dependencies of a captured graph: addresses of parameters and buffers, and the state of adapters."""
    addresses = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    adapters = [
        (
            bool(getattr(module, "disable_adapters", False)),
            str(module.active_adapters),
            str(getattr(module, "merged_adapters", None)),
            str(getattr(module, "scaling", None)),
        )
        for module in model.modules()
        if hasattr(module, "active_adapters") and hasattr(module, "base_layer")
    ]
    return addresses, adapters


def _to_host(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


_PAGED_LENGTHS = (6, 2, 8, 7, 4, 5, 3, 8)
"""Contexts that the paged kernels are tried on, each a prompt and one decoded token."""


def usable_kv_shape(model: nn.Module, block_size: int) -> KVShape | str:
    """The KV shape of the model, after a trial of the kernels; or why they cannot be used."""
    device = device_of(model)
    if device.type == "cuda" and (reason := unavailable(device)) is not None:
        return reason
    if state_layers(model):
        return "it has layers with recurrent states, which are run by the plain runner"
    if both_ways(model) is not None:
        return "the tokens of an image see each other in both directions, which the paged kernels do not know"
    try:
        with on_device(device):
            shape = kv_shape(model)
            if isinstance(shape, KVShape) and not _paged_kernels_agree(model, shape, block_size):
                return "the paged kernels give other hidden states than packed sequences for this model"
    except Exception as error:  # noqa: BLE001 - whatever breaks here would break every step
        return f"{type(error).__name__}: {error}"
    return shape


def kv_shape(model: nn.Module) -> KVShape | str:
    """The KV shape of all layers, or why the kernels cannot be used."""
    if (reason := rows_alone(model)) is not None:
        return f"each context is computed again for each token ({reason})"
    found, shared = kv_layers(model)
    kinds = {(one.kv_heads, one.key_size, one.dtype) for one in found.values()}
    if any(one.params.sinks is not None for one in found.values()):
        return "the model has attention sinks, which the paged kernels do not compute"
    if any(one.params.chunk is not None for one in found.values()):
        return "the model has chunked attention, which the paged kernels do not compute"
    if shared or set(found) != {(layer, 0) for layer in range(len(found))}:
        return "the model's layers share keys and values, or are run more than once"
    if len(kinds) != 1 or any(one.key_size != one.value_size for one in found.values()):
        return "the model's layers have keys and values of different shapes"
    heads, size, dtype = kinds.pop()
    return KVShape(len(found), heads, size, dtype)


def _paged_kernels_agree(model: nn.Module, shape: KVShape, block_size: int) -> bool:
    """Whether prefill and one decoded token through blocks agree with packed attention."""
    device = device_of(model)
    rows, width = len(_PAGED_LENGTHS), -(-max(_PAGED_LENGTHS) // block_size)
    kv_cache = StaticKVCache(shape, rows * width, block_size, device, FixedMemory(device))
    kv_cache.acquire()
    block_tables = torch.arange(rows * width, dtype=torch.int32, device=device).view(rows, width)
    packed = PackedContext(_PAGED_LENGTHS, device)
    tokens, positions = probe_tokens(model, packed.tokens), packed.position_ids[0]
    lengths = torch.tensor(_PAGED_LENGTHS, device=device)
    row_of = torch.repeat_interleave(torch.arange(rows, device=device), lengths)
    slots = row_of * (width * block_size) + positions
    is_last = positions == lengths[row_of] - 1
    prompts = (lengths - 1).int()
    starts = torch.cat([torch.zeros_like(prompts[:1]), prompts.cumsum(0).int()])
    with torch.no_grad(), sampling_mode(model):
        prefill = PrefillContext(kv_cache, slots[~is_last], block_tables, starts, prompts)
        decode = DecodeContext(kv_cache, slots[is_last], block_tables, lengths.int())
        given = torch.empty_like(stock := hidden_states(model, tokens, positions, packed))
        given[~is_last] = hidden_states(model, tokens[~is_last], positions[~is_last], prefill)
        given[is_last] = hidden_states(model, tokens[is_last], positions[is_last], decode)
        with computed_in_float32(model):
            exact = stock_hidden_states(model, tokens, positions, packed)
        logits = head_logits(model, given[is_last])
        ones = torch.ones(rows, device=device)
        drawn = sample_at_temperature(logits, ones, ones.double() * 0.5)
    agrees = all(
        agree_up_to_rounding(given[part], stock[part], exact[part]) for part in (is_last, ~is_last)
    )
    return agrees and bool(drawn[2].all())
