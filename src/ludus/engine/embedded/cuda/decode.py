"""The decode part of a step: one new token for many rows, over static buffers, as a CUDA graph.

The inputs of a step fit into a few small arrays, which the host fills and sends in one copy. The token that a
row reads is the one it sampled in its last step, which never left the device: so a step can be launched before
the results of the one before it are known. Block tables are on the device as well: a decode step writes the one
entry that it needs, and a prefill writes the entries before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.embedded.cuda.graphs import GraphShape, StepGraphs, wide_enough
from ludus.engine.embedded.cuda.kv_cache import StaticKVCache
from ludus.engine.embedded.paged_attention import DecodeContext
from ludus.engine.embedded.request import Chunk
from ludus.engine.embedded.runner import seed_of, uniforms_at
from ludus.kernels import sample_at_temperature
from ludus.kernels.device import Array, StagingBuffers
from ludus.model.forward import head_logits, hidden_states

Ints = npt.NDArray[np.int64]


class RowSampling:
    """Sampling parameters of each batch row, set when its request begins to sample."""

    def __init__(self, rows: int) -> None:
        self._temperatures = np.ones(rows, dtype=np.float32)
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self._prompts = np.zeros(rows, dtype=np.int64)
        self._is_truncated = np.zeros(rows, dtype=np.bool_)

    def note(self, chunks: Sequence[Chunk]) -> None:
        """Chunks that end their request's context: its row samples from now on."""
        for chunk in chunks:
            request, row = chunk.request, chunk.request.row
            self._temperatures[row] = request.sampling.temperature
            self._seeds[row] = seed_of(request.sampling)
            self._prompts[row] = request.prompt
            self._is_truncated[row] = request.sampling.is_truncated

    def at(self, rows: Ints, lengths: Ints) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
        """(temperatures, uniform numbers) for the next token of rows that have these many tokens."""
        return self._temperatures[rows], uniforms_at(self._seeds[rows], lengths - self._prompts[rows])

    def has_truncated(self, rows: Ints) -> bool:
        """Whether one of these rows uses top-k, top-p, min-p or a repetition penalty."""
        return bool(self._is_truncated[rows].any())


_INPUTS = {
    "rows": np.int64,
    "positions": np.int64,
    "slots": np.int64,
    "entries": np.int64,
    "uniform": np.float64,
    "blocks": np.int32,
    "lengths": np.int32,
    "temperatures": np.float32,
}
_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows that graphs are captured for; more than the largest go in multiples of 256."""
_SAMPLE, _LOGITS = "decode", "decode, keeping logits"

_RESULTS = {"tokens": np.int64, "logprobs": np.float32, "finite": np.bool_}


class RowState:
    """Last tokens and block tables of all rows, on the device; one spare row for idle ones."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.idle = rows
        self.last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)

    def widen(self, width: int) -> bool:
        """Make room for this many blocks in a row; whether the block tables have moved."""
        rows, before = self.block_tables.shape
        if width <= before:
            return False
        block_tables = self.block_tables.new_zeros(rows, max(width, 2 * before))
        block_tables[:, :before] = self.block_tables
        self.block_tables = block_tables
        return True

    def keep_block_tables(self, rows_R: Tensor, block_tables_RB: Tensor) -> bool:
        """Store the block tables of some rows; whether all block tables have moved."""
        has_moved = self.widen(block_tables_RB.shape[1])
        self.block_tables[:, : block_tables_RB.shape[1]].index_copy_(0, rows_R, block_tables_RB)
        return has_moved


class DecodeStep:
    """Inputs, results and the computation of decode steps.

    `results` has room for all rows twice: first the decoded rows, then the first tokens of prompts.
    """

    def __init__(
        self,
        model: nn.Module,
        kv_cache: StaticKVCache,
        state: RowState,
        copies: int,
        graphs: StepGraphs,
    ) -> None:
        device = state.block_tables.device
        self._model, self._kv_cache, self._state, self._graphs = model, kv_cache, state, graphs
        self._inputs = StagingBuffers(_INPUTS, state.idle, device, copies)
        self.results = StagingBuffers(_RESULTS, 2 * state.idle, device, copies)
        for kind in (_SAMPLE, _LOGITS):
            graphs.register(kind, self._compute, self._make_idle)

    def launch(
        self,
        copy: int,
        rows: Ints,
        positions: Ints,
        blocks: Ints,
        sampling_inputs: tuple[Array, Array],
        keeps_logits: bool,
        shifts: Ints | None = None,
    ) -> Tensor | None:
        """Launch a step that computes the last token of each row at `positions`, in these blocks.

        `shifts` are added to make rotary positions, behind images that take fewer than they have tokens.
        `sampling_inputs` are temperatures and uniform numbers. With `keeps_logits` nothing is sampled, and the
        rows' logits are returned.
        """
        size = self._kv_cache.block_size
        width = int(positions.max()) // size + 1
        if self._state.widen(width):
            self._graphs.clear()  # they hold the old tables' address
        room = rows_for(len(rows), self._state.idle)
        kind = _LOGITS if keeps_logits else _SAMPLE
        shape = self._graphs.choose(GraphShape(kind, room, room, wide_enough(width, size)))
        # Only now the inputs: choosing may have captured, which fills these buffers with idle rows.
        host, count = self._inputs.hosts[copy], len(rows)
        self._idle(host, count)
        host["rows"][:count] = rows
        host["positions"][:count] = positions if shifts is None else positions + shifts
        host["lengths"][:count] = positions + 1
        host["slots"][:count] = blocks * size + positions % size
        host["entries"][:count] = rows * self._state.block_tables.shape[1] + positions // size
        host["blocks"][:count] = blocks
        host["temperatures"][:count], host["uniform"][:count] = sampling_inputs
        self._inputs.send(copy)
        logits = self._graphs.run(shape)
        return None if logits is None else logits[:count]

    def store(self, place: int, rows: Tensor, sampled: tuple[Tensor, Tensor, Tensor]) -> None:
        """Store sampled tokens: for the rows' next step, and in the results from `place` on."""
        self._state.last_tokens.index_copy_(0, rows, sampled[0])
        for name, values in zip(_RESULTS, sampled, strict=True):
            self.results.device[name][place : place + len(rows)].copy_(values)

    def store_host(
        self, place: int, rows: Ints, sampled: tuple[Sequence[int], Sequence[float], Sequence[bool]]
    ) -> None:
        """Store sampled tokens that are on the host."""
        device = self._state.block_tables.device
        values = [
            torch.tensor(given, dtype=self.results.device[name].dtype, device=device)
            for name, given in zip(_RESULTS, sampled, strict=True)
        ]
        self.store(place, torch.from_numpy(rows).to(device), (values[0], values[1], values[2]))

    def _compute(self, shape: GraphShape) -> Tensor | None:
        """One step over static buffers, captured or called.

        Everything that differs between steps is read from device memory at fixed addresses: a replay repeats
        these kernels with the same pointers and sizes. So rows are padded to `shape.rows` (idle ones write to
        the spare row and the spare block), and block tables are read up to `shape.width`.
        """
        inputs = {name: values[: shape.rows] for name, values in self._inputs.device.items()}
        state, rows = self._state, inputs["rows"]
        # The entry of the block that this token goes to, before the tables are read: a row that begins a block
        # has it in the step itself, without a launch of its own.
        state.block_tables.view(-1).index_copy_(0, inputs["entries"], inputs["blocks"])
        block_tables = state.block_tables[:, : shape.width].index_select(0, rows)
        context = DecodeContext(self._kv_cache, inputs["slots"], block_tables, inputs["lengths"])
        # What the row sampled in the step before, which may not have reached the host yet.
        ids = state.last_tokens.index_select(0, rows)
        hidden = hidden_states(self._model, ids, inputs["positions"], context)
        logits = head_logits(self._model, hidden)
        if shape.kind == _LOGITS:
            return logits
        self.store(0, rows, sample_at_temperature(logits, inputs["temperatures"], inputs["uniform"]))
        return None

    def _make_idle(self) -> None:
        self._idle(self._inputs.hosts[0], 0)
        self._inputs.send(0)

    def _idle(self, host: dict[str, Array], first: int) -> None:
        """Make rows from `first` on idle: what they compute is not read."""
        host["rows"][first:] = self._state.idle
        host["positions"][first:] = 0
        host["lengths"][first:] = 0
        host["slots"][first:] = self._kv_cache.spare_slot
        host["entries"][first:] = self._state.idle * self._state.block_tables.shape[1]
        host["blocks"][first:] = self._kv_cache.count
        host["temperatures"][first:] = 1
        host["uniform"][first:] = 0


def rows_for(rows: int, most: int) -> int:
    """The smallest captured size for so many rows; at most `most`."""
    fitting = [size for size in _SIZES if size >= rows]
    return min(fitting[0] if fitting else -(-rows // 256) * 256, most)
