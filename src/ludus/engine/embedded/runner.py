"""The model runner: one step's tokens in, hidden states, logits, sampled tokens and log-probabilities out.

`make_runner` chooses between two runners. `TorchModelRunner` computes a step at once with plain torch
operations over gathered blocks: it works everywhere and is written for CPUs. On a GPU, `cuda.runner` launches
steps and has their results later, after a trial of the paged kernels on the model (`usable_kv_shape`).

Sampling: one uniform number for each token, inverted through the distribution. The number is a function of the
request's seed and the token's position, so a request draws the same tokens whatever it is batched with.
Reported log-probabilities are those of the full distribution at the request's temperature; top-k, top-p, min-p
and the repetition penalty change only what is drawn.
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

from ludus.core.generation import Sampling
from ludus.core.random import uniforms
from ludus.engine.config import EngineStats
from ludus.engine.embedded.cuda.kv_cache import KVShape, StaticKVCache
from ludus.engine.embedded.paged_attention import KVCache, PagedBatch, PagedContext, TorchKVCache
from ludus.engine.embedded.request import Chunk
from ludus.engine.embedded.state_cache import StateCache
from ludus.model.attention import LookAhead
from ludus.model.forward import DecoderInputs, head_logits, hidden_states
from ludus.model.hf_model import context_limit, device_of, rows_alone
from ludus.model.images import VIRTUAL, embedded_parts, forget_features, images_of
from ludus.model.kv_layers import state_shapes
from ludus.model.packed_attention import PackedContext

# Rows of hidden states that go through the head at once when a prompt is scored.
_HEAD_ROWS = 1024
# Initial width of the block tables of `CudaModelRunner`; they grow with the contexts.
_WIDEST = 8192
# Below 1 by more than the rounding of a product with the total, so that the last token that can be
# drawn is one with a probability.
_LARGEST = 1 - 2.0**-40
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
        ids_T = torch.from_numpy(ids).to(device)
        embedded = embedded_chunks(self._model, chunks, ids_T)
        if rows_alone(self._model) is not None and embedded is None:
            hidden_TH = _whole_contexts(self._model, chunks, device)
        else:
            context = PagedContext(batch, self._kv_cache, device)
            positions_T = torch.from_numpy(rotary_positions(chunks, positions)).to(device)
            hidden_TH = hidden_states(self._model, ids_T, positions_T, context, embedded)
        ends = np.cumsum(batch.counts)
        results = StepResults()
        chosen = [
            (chunk, end - 1) for chunk, end in zip(chunks, ends.tolist(), strict=True) if chunk.samples
        ]
        if chosen:
            last = torch.tensor([end for _, end in chosen], device=device)
            logits_RV = head_logits(self._model, hidden_TH.index_select(0, last))
            sampled = [chunk for chunk, _ in chosen]
            results = StepResults(sampled, *sample_chunks(logits_RV, sampled))
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


def _whole_contexts(model: nn.Module, chunks: Sequence[Chunk], device: torch.device) -> Tensor:
    """Hidden states of the chunks' tokens, where nothing is kept of those before: all are computed again."""
    packed = PackedContext([chunk.stop for chunk in chunks], device)
    tokens = [token for chunk in chunks for token in chunk.request.tokens[: chunk.stop]]
    ids_T = torch.tensor(tokens, device=device)
    hidden = torch.split(hidden_states(model, ids_T, packed.position_ids[0], packed), packed.lengths)
    return torch.cat([part[chunk.start :] for part, chunk in zip(hidden, chunks, strict=True)])


def embedded_chunks(model: nn.Module, chunks: Sequence[Chunk], ids_T: Tensor) -> DecoderInputs | None:
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
    slots: int = 0,
) -> tuple[ModelRunner, KVCache]:
    """The runner and its KV cache; `is_static` and `lookahead` default to what suits the device.

    `slots` are for the recurrent states of a model that has such. The CUDA runner is chosen on a GPU, if a
    trial of the paged kernels on the model succeeds.
    """
    from ludus.engine.embedded.cuda.runner import (  # it imports this module
        CudaModelRunner,
        usable_kv_shape,
    )

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
    shapes = state_shapes(model)
    plain = TorchKVCache(blocks, block_size, StateCache(shapes, slots, device) if shapes else None)
    return TorchModelRunner(model, plain), plain


@cache
def _warn_slow(reason: str) -> None:
    _log.warning(
        "sampling without the GPU's kernels and graphs, which is several times slower: %s", reason
    )


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
    values: list[Tensor] = []
    for first in range(0, len(following), _HEAD_ROWS):
        targets = torch.tensor(following[first : first + _HEAD_ROWS], device=hidden_CH.device)
        logits = head_logits(model, hidden_CH[first : first + len(targets)]).float()
        values.append(torch.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0])
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
    ahead = _look_ahead(chunks, positions_T)
    slots = [chunk.request.block_table.slot for chunk in chunks]
    states = None if slots[0] is None else np.array(slots)
    batch = PagedBatch(slots_T, counts_R, lengths_R, block_tables[rows_R, :width], ahead, states)
    ids_T = np.array(ids)
    if any(chunk.request.images for chunk in chunks):
        ids_T[ids_T >= VIRTUAL] = 0  # features are read there, and no token's embedding
    return ids_T, positions_T, batch


def _look_ahead(chunks: Sequence[Chunk], positions_T: npt.NDArray[np.int64]) -> LookAhead | None:
    """What the tokens of chunks see, where that is more than themselves and what is before them."""
    layouts = [chunk.request.layout for chunk in chunks]
    if not any(layout is not None and layout.runs for layout in layouts):
        return None
    parts = [
        np.arange(chunk.start, chunk.stop) if layout is None else layout.last(chunk.start, chunk.stop)
        for chunk, layout in zip(chunks, layouts, strict=True)
    ]
    windows_only = any(layout is not None and layout.windows_only for layout in layouts)
    return LookAhead(np.concatenate(parts), windows_only)


def rotary_positions(
    chunks: Sequence[Chunk], positions_T: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """[T], or [3, T] where tokens of images have positions in three dimensions, from places [T]."""
    if all(chunk.request.layout is None for chunk in chunks):
        return positions_T
    places = iter(np.split(positions_T, np.cumsum([c.stop - c.start for c in chunks])[:-1]))
    positions_3T = np.concatenate(
        [
            np.broadcast_to(own, (3, len(own)))
            if (layout := chunk.request.layout) is None
            else layout.positions(chunk.start, chunk.stop)
            for chunk, own in zip(chunks, places, strict=True)
        ],
        axis=1,
    )
    is_text = bool((positions_3T == positions_3T[0]).all())
    return positions_3T[0] if is_text else positions_3T


def sample_with_params(
    logits_RV: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    seen: Sequence[npt.NDArray[np.bool_] | None],
) -> tuple[list[int], list[float], list[bool]]:
    """Tokens, their log-probabilities, and whether each row was finite (no NaN), for R rows.

    `positions` count the tokens each request has generated; `seen` marks the tokens of its context
    for the rows that ask for a repetition penalty.
    """
    logits_RV = logits_RV.float()
    temperatures = [s.temperature or 1.0 for s in samplings]
    logprobs_RV = log_softmax_at(logits_RV, temperatures)
    special = [i for i, s in enumerate(samplings) if s.temperature == 0 or s.is_truncated]
    if len(special) == len(samplings):
        tokens_R = _draw_special(logits_RV, samplings, positions, seen)
    else:
        tokens_R = _draw(torch.exp(logprobs_RV), samplings, positions)
        if special:
            tokens_R[special] = _draw_special(
                logits_RV[special],
                [samplings[i] for i in special],
                [positions[i] for i in special],
                [seen[i] for i in special],
            )
    values_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    return tokens_R.tolist(), values_R.tolist(), torch.isfinite(values_R).tolist()


def log_softmax_at(logits_RV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """log softmax(logits / T) row by row; safe for tiny temperatures."""
    if any(t != 1 for t in temperatures):
        divisor = torch.tensor(temperatures, dtype=torch.float32, device=logits_RV.device)[:, None]
        logits_RV = (logits_RV - logits_RV.amax(1, keepdim=True)) / divisor
    return torch.log_softmax(logits_RV, dim=1)


def seed_of(sampling: Sampling) -> np.uint64:
    """A request's seed as the random numbers take it."""
    return np.uint64(sampling.seed & 0xFFFFFFFFFFFFFFFF)


def uniforms_at(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The uniform number of each draw: a function of its seed and position alone."""
    return np.minimum(uniforms(seeds, positions), _LARGEST)


def _draw(weights_RV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """The token at which the cumulated weights pass each row's uniform number times their total."""
    uniform = uniforms_at(np.array([seed_of(s) for s in samplings]), positions)
    cumulated_RV = weights_RV.double().cumsum(1)
    targets = torch.from_numpy(uniform).to(weights_RV.device)[:, None] * cumulated_RV[:, -1:]
    found = torch.searchsorted(cumulated_RV, targets, right=True)[:, 0]
    return found.clamp_(max=weights_RV.shape[1] - 1)


def _draw_special(
    logits_RV: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    seen: Sequence[npt.NDArray[np.bool_] | None],
) -> Tensor:
    """Rows that are greedy, truncated or penalised."""
    if any(mark is not None for mark in seen):
        logits_RV = _penalised(logits_RV, samplings, seen)
    tokens_R = logits_RV.argmax(1)
    drawn = [i for i, s in enumerate(samplings) if s.temperature > 0]
    if drawn:
        chosen = [samplings[i] for i in drawn]
        weights = _truncated(logits_RV[drawn], chosen)
        tokens_R[drawn] = _draw(weights, chosen, [positions[i] for i in drawn])
    return tokens_R


def _penalised(
    logits_RV: Tensor, samplings: Sequence[Sampling], seen: Sequence[npt.NDArray[np.bool_] | None]
) -> Tensor:
    """Tokens of the context made less likely: positive logits divided, negative ones multiplied."""
    nothing = np.zeros(logits_RV.shape[1], dtype=np.bool_)
    marks = np.stack([nothing if mark is None else mark for mark in seen])
    seen_RV = torch.from_numpy(marks).to(logits_RV.device)
    penalties = torch.tensor([s.repetition_penalty for s in samplings], device=logits_RV.device)[:, None]
    penalised = torch.where(logits_RV > 0, logits_RV / penalties, logits_RV * penalties)
    return torch.where(seen_RV, penalised, logits_RV)


def _truncated(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Probabilities at temperature, zero outside top-k, then top-p of what is left, then min-p."""
    device = logits_RV.device
    probabilities = torch.exp(log_softmax_at(logits_RV, [s.temperature for s in samplings]))
    ordered, order = probabilities.sort(dim=1, descending=True, stable=True)
    size = logits_RV.shape[1]
    top_k = torch.tensor([s.top_k or size for s in samplings], device=device)[:, None]
    ordered = ordered * (torch.arange(size, device=device) < top_k)
    cumulated = ordered.double().cumsum(1)
    before = cumulated - ordered
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)[:, None]
    keep = (before < top_p * cumulated[:, -1:]) | (top_p >= 1)
    min_p = torch.tensor([s.min_p for s in samplings], device=device)[:, None]
    keep &= ordered >= min_p * ordered[:, :1]
    return torch.zeros_like(probabilities).scatter_(1, order, ordered * keep)
