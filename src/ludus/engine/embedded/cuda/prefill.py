"""The prefill part of a step: prompts, new turns and scores, many new tokens of a few rows in one forward pass.

A short pass over plain requests replays a CUDA graph (`GraphPrefill`). Long passes, scores and truncated
sampling are launched kernel by kernel; long ones keep the device busy all the same. Tensor names: T new tokens,
R rows, S rows that sample.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.embedded.cuda.decode import DecodeStep, RowSampling, RowState
from ludus.engine.embedded.cuda.graphs import GraphShape, StepGraphs, wide_enough
from ludus.engine.embedded.cuda.kv_cache import StaticKVCache
from ludus.engine.embedded.paged_attention import PrefillContext
from ludus.engine.embedded.request import Chunk
from ludus.engine.embedded.runner import (
    embedded_chunks,
    flat_batch,
    rotary_positions,
    sample_chunks,
    score,
)
from ludus.kernels import sample_at_temperature
from ludus.kernels.device import Array, StagingBuffers, arrays_to_device
from ludus.model.forward import head_logits, hidden_states

Ints = npt.NDArray[np.int64]

OF_TOKENS: dict[str, Any] = {"ids_T": np.int64, "positions_T": np.int64, "slots_T": np.int64}
OF_ROWS: dict[str, Any] = {
    "rows_R": np.int64,
    "lengths_R": np.int32,
    "starts_R1": np.int32,
    "last_S": np.int64,
    "sampling_rows_S": np.int64,
    "temperatures_S": np.float32,
    "uniform_S": np.float64,
}


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The inputs of a forward pass over prompts and new turns; array names are those of the dtypes above."""

    chunks: Sequence[Chunk]
    sampling_chunks: list[Chunk]
    """The chunks that sample a token."""
    ids_T: Array
    positions_T: Array
    """[3, T] where there are images whose tokens have positions in three dimensions."""
    slots_T: Array
    rows_R: Array
    lengths_R: Array
    """Tokens of each row, the new ones included."""
    starts_R1: Array
    """Where each row's new tokens begin; at the end, how many there are."""
    block_tables_RB: Array
    last_S: Array
    """Index of the last new token of each row that samples."""
    sampling_rows_S: Array
    """The row."""
    temperatures_S: Array
    uniform_S: Array

    @property
    def arrays(self) -> dict[str, Array]:
        names = (field.name for field in fields(self) if field.name in OF_TOKENS | OF_ROWS)
        return {name: getattr(self, name) for name in names}

    @property
    def tokens(self) -> int:
        return len(self.ids_T)

    @property
    def is_plain(self) -> bool:
        """Whether it only samples, from full distributions, and reads no image."""
        return not any(
            c.request.is_score or c.request.sampling.is_truncated or has_image(c) for c in self.chunks
        )


def has_image(chunk: Chunk) -> bool:
    """Whether a part of an image is among the chunk's tokens."""
    return any(i.start < chunk.stop and i.stop > chunk.start for i in chunk.request.images)


def prefill_batch(
    chunks: Sequence[Chunk], block_tables: Ints, block_size: int, row_sampling: RowSampling
) -> PrefillBatch:
    """The inputs for these chunks; `block_tables` has a row for each batch row."""
    ids_T, positions_T, flat = flat_batch(chunks, block_tables, block_size)
    starts_R1 = np.concatenate([[0], np.cumsum(flat.counts)])
    rows_R = np.array([chunk.request.row for chunk in chunks])
    places = np.flatnonzero([chunk.samples for chunk in chunks])
    sampling_chunks = [chunk for chunk in chunks if chunk.samples]
    row_sampling.note(sampling_chunks)
    temperatures_S, uniform_S = row_sampling.at(rows_R[places], flat.lengths[places])
    return PrefillBatch(
        chunks=chunks,
        sampling_chunks=sampling_chunks,
        ids_T=ids_T,
        positions_T=rotary_positions(chunks, positions_T),
        slots_T=flat.slots,
        rows_R=rows_R,
        lengths_R=flat.lengths.astype(np.int32),
        starts_R1=starts_R1.astype(np.int32),
        block_tables_RB=flat.block_tables.astype(np.int32),
        last_S=starts_R1[1:][places] - 1,
        sampling_rows_S=rows_R[places],
        temperatures_S=temperatures_S,
        uniform_S=uniform_S,
    )


SIZES = ((64, 4), (128, 8), (256, 16), (512, 32), (1024, 64), (1536, 64), (2048, 64))
"""(tokens, rows) that graphs are captured for."""
KIND = "prefill"


@dataclass(frozen=True, slots=True)
class StepParts:
    """Inputs and buffers of a prefill pass, as a graph or not."""

    model: nn.Module
    kv_cache: StaticKVCache
    state: RowState
    decode: DecodeStep
    graphs: StepGraphs

    @property
    def device(self) -> torch.device:
        return self.state.block_tables.device

    def keep_block_tables(self, rows_R: Tensor, block_tables_RB: Tensor) -> None:
        """Store the rows' block tables for this pass and the steps that follow."""
        if self.state.keep_block_tables(rows_R, block_tables_RB):
            self.graphs.clear()

    def hidden_states(
        self, inputs: dict[str, Tensor], block_tables_RB: Tensor, chunks: Sequence[Chunk] = ()
    ) -> Tensor:
        """[T, D]: the last hidden states of new tokens; their keys and values go into the KV cache."""
        names = ("slots_T", "starts_R1", "lengths_R")
        slots_T, starts_R1, lengths_R = (inputs[name] for name in names)
        context = PrefillContext(self.kv_cache, slots_T, block_tables_RB, starts_R1, lengths_R)
        ids_T = inputs["ids_T"]
        embedded_TD = embedded_chunks(self.model, chunks, ids_T)
        return hidden_states(self.model, ids_T, inputs["positions_T"], context, embedded_TD)


class GraphPrefill:
    """Short prefill as a CUDA graph over static buffers.

    Most steps of an agent's episodes have a new turn or two beside hundreds of rows that decode. Launched
    kernel by kernel, that takes the host several times as long as the device. Surplus tokens and rows of a
    captured size are idle: they write to the spare block, and their results are not read.
    """

    def __init__(self, parts: StepParts, copies: int) -> None:
        self._parts = parts
        self._state, self._graphs = parts.state, parts.graphs
        tokens, rows = SIZES[-1]
        self._tokens = StagingBuffers(OF_TOKENS, tokens, parts.device, copies)
        self._rows = StagingBuffers(OF_ROWS, rows + 1, parts.device, copies)
        parts.graphs.register(KIND, self._compute, self._make_idle)

    def size_for(self, batch: PrefillBatch) -> tuple[int, int] | None:
        """(tokens, rows) of the smallest graph that fits this batch, if any."""
        if not batch.is_plain or self._graphs.has_refused(KIND):
            return None
        most = self._state.idle
        fitting = (
            (tokens, min(rows, most))
            for tokens, rows in SIZES
            if tokens >= batch.tokens and min(rows, most) >= len(batch.chunks)
        )
        return next(fitting, None)

    def launch(self, copy: int, batch: PrefillBatch, size: tuple[int, int]) -> None:
        """Launch the pass; the host buffers of a copy are free again when the step has been collected."""
        block_tables_RB, rows_R = arrays_to_device(
            [batch.block_tables_RB, batch.rows_R], self._parts.device
        )
        self._parts.keep_block_tables(rows_R, block_tables_RB)
        width = wide_enough(block_tables_RB.shape[1], self._parts.kv_cache.block_size)
        shape = self._graphs.choose(GraphShape(KIND, *size, width))
        self._idle(copy)
        for name, values in batch.arrays.items():
            buffers = self._tokens if name in OF_TOKENS else self._rows
            buffers.hosts[copy][name][: len(values)] = values
        # Idle rows begin and end where the last row ends.
        self._rows.hosts[copy]["starts_R1"][len(batch.chunks) :] = batch.tokens
        self._tokens.send(copy)
        self._rows.send(copy)
        self._graphs.run(shape)

    def _compute(self, shape: GraphShape) -> None:
        inputs = {name: values[: shape.tokens] for name, values in self._tokens.device.items()}
        inputs |= {name: values[: shape.rows] for name, values in self._rows.device.items()}
        inputs["starts_R1"] = self._rows.device["starts_R1"][: shape.rows + 1]
        block_tables_RB = self._state.block_tables[:, : shape.width].index_select(0, inputs["rows_R"])
        hidden_TD = self._parts.hidden_states(inputs, block_tables_RB)
        logits_RV = head_logits(self._parts.model, hidden_TD.index_select(0, inputs["last_S"]))
        sampled = sample_at_temperature(logits_RV, inputs["temperatures_S"], inputs["uniform_S"])
        self._parts.decode.store(self._state.idle, inputs["sampling_rows_S"], sampled)

    def _make_idle(self) -> None:
        self._idle(0)
        self._tokens.send(0)
        self._rows.send(0)

    def _idle(self, copy: int) -> None:
        for buffers in (self._tokens, self._rows):
            for values in buffers.hosts[copy].values():
                values[:] = 0
        self._tokens.hosts[copy]["slots_T"][:] = self._parts.kv_cache.spare_slot
        rows = self._rows.hosts[copy]
        rows["rows_R"][:] = rows["sampling_rows_S"][:] = self._state.idle
        rows["temperatures_S"][:] = 1


Scores = list[tuple[Chunk, Tensor]]

_log = logging.getLogger(__name__)

_FEWEST_TOKENS = 64
"""A forward pass of so few tokens is not split any further when memory runs out."""


class PrefillStep:
    """Runs the chunks of a step that do not decode; their sampled tokens follow the decoder's results."""

    def __init__(self, parts: StepParts, row_sampling: RowSampling, copies: int) -> None:
        self._parts, self._row_sampling = parts, row_sampling
        self._graph = GraphPrefill(parts, copies)
        self._most_tokens: int | None = None
        self._has_room = True  # for graphs, which are padded

    def launch(self, copy: int, chunks: Sequence[Chunk], block_tables: Ints) -> Scores:
        """Launch the pass, in parts if memory is short; the log-probabilities of the chunks that score."""
        place, scores = self._parts.state.idle, Scores()
        todo = [list(chunks)]
        may_use_graph = self._has_room
        while todo:
            part = todo.pop()
            count = _tokens(part)
            if self._most_tokens is not None and count > self._most_tokens:
                todo += reversed(halves(part))
                may_use_graph = False  # a step has one set of static buffers
                continue
            batch = prefill_batch(
                part, block_tables, self._parts.kv_cache.block_size, self._row_sampling
            )
            size = self._graph.size_for(batch) if may_use_graph else None
            has_failed = False
            try:
                if size is not None:
                    self._graph.launch(copy, batch, size)
                else:
                    scores += self._launch_eager(batch, place)
            except torch.OutOfMemoryError:
                if size is None and count <= _FEWEST_TOKENS:
                    raise
                has_failed = True
            if has_failed:
                torch.cuda.empty_cache()  # only now: the error's frames held the pass's memory
                may_use_graph = False
                if size is None:
                    self._most_tokens = count // 2
                    _log.warning(
                        "a forward pass ran out of memory: at most %d tokens are computed at once until the "
                        "next pause; lower engine.tokens_per_step or engine.memory to avoid this",
                        self._most_tokens,
                    )
                else:
                    self._has_room = False
                    _log.warning(
                        "a padded prefill ran out of memory: prompts are computed without padding and graphs "
                        "until the next pause, which is slower; lower engine.memory to avoid this"
                    )
                todo.append(part)
            else:
                place += len(batch.sampling_chunks)
        return scores

    def forget_limit(self) -> None:
        """Try full sizes again: the trainer may have needed the memory then."""
        self._most_tokens, self._has_room = None, True

    def _launch_eager(self, batch: PrefillBatch, place: int) -> Scores:
        *values, block_tables_RB = arrays_to_device(
            [*batch.arrays.values(), batch.block_tables_RB], self._parts.device
        )
        inputs = dict(zip(batch.arrays, values, strict=True))
        model, decode = self._parts.model, self._parts.decode
        self._parts.keep_block_tables(inputs["rows_R"], block_tables_RB)
        hidden_TD = self._parts.hidden_states(inputs, block_tables_RB, batch.chunks)
        if batch.sampling_chunks:
            logits_SV = head_logits(model, hidden_TD.index_select(0, inputs["last_S"]))
            if any(chunk.request.sampling.is_truncated for chunk in batch.sampling_chunks):
                sampled = sample_chunks(logits_SV, batch.sampling_chunks)
                decode.store_host(place, batch.sampling_rows_S, sampled)
            else:
                sampled_S = sample_at_temperature(
                    logits_SV, inputs["temperatures_S"], inputs["uniform_S"]
                )
                decode.store(place, inputs["sampling_rows_S"], sampled_S)
        starts = batch.starts_R1.tolist()
        return [
            (chunk, score(model, chunk, hidden_TD[start:stop]))
            for chunk, start, stop in zip(batch.chunks, starts[:-1], starts[1:], strict=True)
            if chunk.request.is_score
        ]


def _tokens(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.stop - chunk.start for chunk in chunks)


def halves(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Two parts of about as many tokens, to be computed in order; a chunk may be cut in two."""
    left: list[Chunk] = []
    right: list[Chunk] = []
    room = _tokens(chunks) // 2
    for chunk in chunks:
        size = chunk.stop - chunk.start
        if size <= room:
            left.append(chunk)
        elif room > 0:
            middle = chunk.start + room
            left.append(chunk._replace(stop=middle, samples=False))
            right.append(chunk._replace(start=middle))
        else:
            right.append(chunk)
        room = max(0, room - size)
    return [left, right]
