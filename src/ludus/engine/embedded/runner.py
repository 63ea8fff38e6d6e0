"""The model runner: one step's tokens in, hidden states, logits, sampled tokens and log-probabilities out.

`make_runner` chooses between two runners. `TorchModelRunner` computes a step at once with plain torch
operations over gathered blocks: it works everywhere and is written for CPUs. On a GPU, `cuda.runner` launches
steps and has their results later, after a trial of the paged kernels on the model (`usable_kv_shape`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.config import EngineStats
from ludus.engine.embedded.cuda.kv_cache import FixedMemory, KVShape, StaticKVCache
from ludus.engine.embedded.paged_attention import (
    DecodeContext,
    KVCache,
    PagedBatch,
    PagedContext,
    PrefillContext,
    TorchKVCache,
)
from ludus.engine.embedded.request import Chunk
from ludus.engine.embedded.sampler import log_softmax_at, sample_with_params
from ludus.kernels import sample_at_temperature, unavailable
from ludus.kernels.device import on_device
from ludus.model.attention import AttentionParams
from ludus.model.forward import head_logits, hidden_states, stock_hidden_states
from ludus.model.hf_model import context_limit, device_of, sampling_mode
from ludus.model.image_features import embedded_parts, forget_features
from ludus.model.images import VIRTUAL, images_of
from ludus.model.packed_attention import PackedContext
from ludus.model.probes import agree_up_to_rounding, computed_in_float32, probe_tokens

# Rows of hidden states that go through the head at once when a prompt is scored.
_HEAD_ROWS = 1024
# Initial width of the block tables of `CudaModelRunner`; they grow with the contexts.
_WIDEST = 8192
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepResults:
    """The results of a step: a token for each chunk that samples, log-probabilities for each that scores."""

    sampled: list[Chunk] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    """False where the model gave NaN."""
    scores: list[tuple[Chunk, list[float]]] = field(default_factory=list)


class PendingStep(Protocol):
    """A step that was launched."""

    chunks: Sequence[Chunk]
    is_urgent: bool
    """Whether the next step cannot be scheduled without its results."""

    def result(self) -> StepResults:
        """Wait for the step; once."""


class ModelRunner(Protocol):
    """Runs chunks through the model."""

    lookahead: int
    """How many steps may be in flight while the next one is scheduled."""

    def launch(
        self, chunks: Sequence[Chunk], block_tables: npt.NDArray[np.int64], blocks: int
    ) -> PendingStep:
        """Launch a step. `block_tables` has a row for each batch row; `blocks` counts blocks in use."""

    def refresh(self) -> None:
        """Weights or memory may have moved: check what depends on their addresses."""

    def close(self) -> None:
        """Free the device's memory."""


@dataclass(slots=True)
class CompletedStep:
    """A step whose results are known already."""

    chunks: Sequence[Chunk]
    results: StepResults
    is_urgent: bool = True

    def result(self) -> StepResults:
        return self.results


class TorchModelRunner:
    """Runs chunks through the model, one step at a time."""

    lookahead = 0

    def __init__(self, model: nn.Module, kv_cache: TorchKVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache

    def launch(
        self, chunks: Sequence[Chunk], block_tables: npt.NDArray[np.int64], blocks: int
    ) -> CompletedStep:
        self._kv_cache.ensure(blocks)
        device = device_of(self._model)
        ids, positions, batch = flat_batch(chunks, block_tables, self._kv_cache.block_size)
        context = PagedContext(batch, self._kv_cache, device)
        ids_T = torch.from_numpy(ids).to(device)
        hidden_TH = hidden_states(
            self._model,
            ids_T,
            torch.from_numpy(positions).to(device),
            context,
            embedded_chunks(self._model, chunks, ids_T),
        )
        ends = np.cumsum(batch.counts)
        results = self._sample(chunks, hidden_TH, ends)
        results.scores = [
            (
                chunk,
                score(self._model, chunk, hidden_TH[end - (chunk.stop - chunk.start) : end]).tolist(),
            )
            for chunk, end in zip(chunks, ends.tolist(), strict=True)
            if chunk.request.is_score
        ]
        return CompletedStep(chunks, results)

    def refresh(self) -> None:
        """Nothing here depends on addresses; features depend on weights."""
        forget_features(self._model)

    def close(self) -> None:
        """Nothing here is kept."""

    def _sample(
        self, chunks: Sequence[Chunk], hidden_TH: Tensor, ends: npt.NDArray[np.int64]
    ) -> StepResults:
        chosen = [
            (chunk, end - 1) for chunk, end in zip(chunks, ends.tolist(), strict=True) if chunk.samples
        ]
        if not chosen:
            return StepResults()
        last = torch.tensor([end for _, end in chosen], device=hidden_TH.device)
        logits_RV = head_logits(self._model, hidden_TH.index_select(0, last))
        sampled = [chunk for chunk, _ in chosen]
        return StepResults(sampled, *sample_chunks(logits_RV, sampled))


def embedded_chunks(model: nn.Module, chunks: Sequence[Chunk], ids_T: Tensor) -> Tensor | None:
    """Input embeddings of chunks with images; None where there are no images."""
    processor = images_of(model)
    if processor is None or not any(chunk.request.images for chunk in chunks):
        return None
    parts = ((c.request.images, c.start, c.stop) for c in chunks)
    return embedded_parts(model, processor, parts, ids_T)


def make_runner(
    model: nn.Module,
    blocks: int,
    block_size: int,
    rows: int,
    stats: EngineStats,
    is_static: bool | None = None,
    lookahead: int | None = None,
) -> tuple[ModelRunner, KVCache]:
    """The runner and its KV cache; `is_static` and `lookahead` default to what suits the device.

    The CUDA runner is chosen on a GPU, if a trial of the paged kernels on the model succeeds.
    """
    from ludus.engine.embedded.cuda.runner import CudaModelRunner  # which imports this module

    device = device_of(model)
    on_gpu = device.type == "cuda"
    if on_gpu if is_static is None else is_static:
        shape = usable_kv_shape(model, block_size)
        if isinstance(shape, KVShape):
            kv_cache = StaticKVCache(shape, blocks, block_size, device)
            tokens = min(context_limit(model) or blocks * block_size, blocks * block_size)
            runner = CudaModelRunner(
                model,
                kv_cache,
                rows=rows,
                width=min(-(-tokens // block_size), _WIDEST),
                stats=stats,
                lookahead=int(on_gpu) if lookahead is None else lookahead,
            )
            return runner, kv_cache
        _warn_slow(shape)
    plain = TorchKVCache(blocks, block_size)
    return TorchModelRunner(model, plain), plain


@cache
def _warn_slow(reason: str) -> None:
    _log.warning(
        "sampling without the GPU's kernels and graphs, which is several times slower: %s", reason
    )


_PAGED_LENGTHS = (6, 2, 8, 7, 4, 5, 3, 8)
"""Contexts that the paged kernels are tried on, each a prompt and one decoded token."""


def usable_kv_shape(model: nn.Module, block_size: int) -> KVShape | str:
    """The KV shape of the model, after a trial of the kernels; or why they cannot be used."""
    device = device_of(model)
    if device.type == "cuda" and (reason := unavailable(device)) is not None:
        return reason
    try:
        with on_device(device):
            shape = kv_shape(model)
            if isinstance(shape, KVShape) and not _paged_kernels_agree(model, shape, block_size):
                return "the paged kernels give other hidden states than packed sequences for this model"
    except Exception as error:  # noqa: BLE001 - whatever breaks here would break every step
        return f"{type(error).__name__}: {error}"
    return shape


class _ShapeProbe:
    """An attention context that records the shape of each layer's keys, and returns zeros."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, int, torch.dtype]] = {}
        self.has_other_values = False

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        self.found[layer] = (key.shape[1], key.shape[3], key.dtype)
        self.has_other_values |= key.shape != value.shape
        return torch.zeros(
            1, query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype, device=query.device
        )


def kv_shape(model: nn.Module) -> KVShape | str:
    """The KV shape of all layers, or why they have no common one."""
    probe = _ShapeProbe()
    tokens = probe_tokens(model, 1)
    with torch.no_grad(), sampling_mode(model):
        hidden_states(model, tokens, torch.zeros_like(tokens), probe)
    kinds = set(probe.found.values())
    if len(kinds) != 1 or probe.has_other_values or set(probe.found) != set(range(len(probe.found))):
        return "the model's layers have keys and values of different shapes"
    heads, size, dtype = kinds.pop()
    return KVShape(len(probe.found), heads, size, dtype)


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


def sample_chunks(
    logits_RV: Tensor, chunks: Sequence[Chunk]
) -> tuple[list[int], list[float], list[bool]]:
    """(tokens, log-probabilities, whether finite) by each request's sampling parameters.

    A row that cannot be sampled fails alone: its request keeps the error (`Request.failure`).
    """
    try:
        requests = [chunk.request for chunk in chunks]
        return sample_with_params(
            logits_RV,
            [request.sampling for request in requests],
            [chunk.stop - chunk.request.prompt for chunk in chunks],
            [request.seen for request in requests],
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whose row it was shows when each is sampled alone
        if len(chunks) == 1:
            chunks[0].request.failure = error
            return [0], [0.0], [True]
    rows = [sample_chunks(logits_RV[i : i + 1], [chunk]) for i, chunk in enumerate(chunks)]
    return [row[0][0] for row in rows], [row[1][0] for row in rows], [row[2][0] for row in rows]


def score(model: nn.Module, chunk: Chunk, hidden_CH: Tensor) -> Tensor:
    """The log-probability of each token that follows one of the chunk's."""
    following = chunk.request.tokens[chunk.start + 1 : chunk.stop + 1]
    if chunk.request.images:
        following = [chunk.request.placeholder if t >= VIRTUAL else t for t in following]
    temperature = chunk.request.sampling.temperature or 1.0
    values: list[Tensor] = []
    for first in range(0, len(following), _HEAD_ROWS):
        targets = torch.tensor(following[first : first + _HEAD_ROWS], device=hidden_CH.device)
        logits = head_logits(model, hidden_CH[first : first + len(targets)]).float()
        logprobs = log_softmax_at(logits, [temperature] * len(targets))
        values.append(logprobs.gather(1, targets[:, None])[:, 0])
    return torch.cat(values) if values else hidden_CH.new_empty(0, dtype=torch.float32)


def flat_batch(
    chunks: Sequence[Chunk], block_tables: npt.NDArray[np.int64], block_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], PagedBatch]:
    """Token ids, positions and cache slots of all chunks, end to end."""
    ids: list[int] = []
    positions: list[int] = []
    for chunk in chunks:
        if chunk.stop - chunk.start == 1:
            ids.append(chunk.request.tokens[chunk.start])
            positions.append(chunk.start)
        else:
            ids += chunk.request.tokens[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
    rows_R = np.array([chunk.request.row for chunk in chunks])
    lengths_R = np.array([chunk.stop for chunk in chunks])
    counts_R = lengths_R - np.array([chunk.start for chunk in chunks])
    positions_T = np.array(positions)
    blocks_T = block_tables[np.repeat(rows_R, counts_R), positions_T // block_size]
    slots_T = blocks_T * block_size + positions_T % block_size
    width = -(-int(lengths_R.max()) // block_size)
    batch = PagedBatch(slots_T, counts_R, lengths_R, block_tables[rows_R, :width])
    ids_T = np.array(ids)
    if any(chunk.request.images for chunk in chunks):
        ids_T[ids_T >= VIRTUAL] = 0  # features are read there, and no token's embedding
    return ids_T, positions_T, batch
