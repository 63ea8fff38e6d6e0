"""What each row draws its tokens with, as arrays: set when a request gets its row, read in every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.cuda.graphs import Shape, StepGraphs, wide_enough
from ludus.engine.cuda.kv_cache import FixedStore
from ludus.engine.model_runner import head_logits, hidden_states
from ludus.engine.paged_attention import DecodeContext
from ludus.engine.sampler import seed_of, shares_at
from ludus.engine.scheduler import Chunk
from ludus.kernels import sample
from ludus.kernels.device import Array, Mirror

Ints = npt.NDArray[np.int64]


class RowDraws:
    """Temperatures, seeds and where the prompt ends, row by row."""

    def __init__(self, rows: int) -> None:
        self._temperatures = np.ones(rows, dtype=np.float32)
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self._prompts = np.zeros(rows, dtype=np.int64)
        self._is_truncated = np.zeros(rows, dtype=np.bool_)

    def note(self, chunks: Sequence[Chunk]) -> None:
        """Chunks that end their request's context: from now on, its row draws."""
        for chunk in chunks:
            request, row = chunk.request, chunk.request.row
            self._temperatures[row] = request.sampling.temperature
            self._seeds[row] = seed_of(request.sampling)
            self._prompts[row] = request.prompt
            self._is_truncated[row] = request.sampling.is_truncated

    def at(self, rows: Ints, lengths: Ints) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
        """Temperatures, and the share of each row's next token, where rows have these many tokens."""
        return self._temperatures[rows], shares_at(self._seeds[rows], lengths - self._prompts[rows])

    def has_truncated(self, rows: Ints) -> bool:
        """Whether one of these rows draws from another distribution than the one it reports."""
        return bool(self._is_truncated[rows].any())


# --- decode ---
# One new token for many rows, over static buffers: what a graph captures.
#
# All that a step needs to know fits into a few small arrays, which the host fills and sends in one copy. The
# token a row reads is the one it drew in its last step, which never left the device; so a step can be launched
# before anybody knows what the one before it gave. A row's table of pages is on the device as well: a step
# writes the entry that it needs itself, and a prompt writes the ones before.


_INPUTS = {
    "rows": np.int64,
    "positions": np.int64,
    "slots": np.int64,
    "entries": np.int64,
    "shares": np.float64,
    "pages": np.int32,
    "lengths": np.int32,
    "temperatures": np.float32,
}
_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows that graphs are captured for; more than the largest go in multiples of 256."""
_DRAWING, _KEEPING = "decode", "decode, keeping logits"

_RESULTS = {"tokens": np.int64, "logprobs": np.float32, "sound": np.bool_}


class RowState:
    """What the device keeps of each row from step to step; one row more than there are, for idle ones."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.idle = rows
        self.last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)

    def widen(self, width: int) -> bool:
        """Have tables of at least this many pages; whether they have moved."""
        rows, before = self.tables.shape
        if width <= before:
            return False
        tables = self.tables.new_zeros(rows, max(width, 2 * before))
        tables[:, :before] = self.tables
        self.tables = tables
        return True

    def keep_tables(self, rows_R: Tensor, tables_RP: Tensor) -> bool:
        """Note the pages of some rows; whether all tables have moved for it."""
        has_moved = self.widen(tables_RP.shape[1])
        self.tables[:, : tables_RP.shape[1]].index_copy_(0, rows_R, tables_RP)
        return has_moved


class DecodeStep:
    """Inputs, results and the computation of decode steps.

    Results have room for all rows twice: a step's decoded rows come first, and the first tokens of its prompts
    after `rows`.
    """

    def __init__(
        self,
        model: nn.Module,
        store: FixedStore,
        state: RowState,
        copies: int,
        graphs: StepGraphs,
    ) -> None:
        device = state.tables.device
        self._model, self._store, self._state, self._graphs = model, store, state, graphs
        self._inputs = Mirror(_INPUTS, state.idle, device, copies)
        self.results = Mirror(_RESULTS, 2 * state.idle, device, copies)
        for kind in (_DRAWING, _KEEPING):
            graphs.serve(kind, self._compute, self._rest)

    def launch(
        self,
        copy: int,
        rows: Ints,
        positions: Ints,
        pages: Ints,
        draws: tuple[Array, Array],
        keeps_logits: bool,
    ) -> Tensor | None:
        """Begin a step that computes the last token of each row at `positions`, in these pages.

        `draws` are the temperatures and shares that the next tokens are drawn with. With `keeps_logits`
        nothing is drawn, and the rows' logits are given instead.
        """
        size = self._store.page_size
        width = int(positions.max()) // size + 1
        if self._state.widen(width):
            self._graphs.clear()
        room = rows_for(len(rows), self._state.idle)
        kind = _KEEPING if keeps_logits else _DRAWING
        shape = self._graphs.choose(Shape(kind, room, room, wide_enough(width, size)))
        host, count = self._inputs.hosts[copy], len(rows)
        self._idle(host, count)
        host["rows"][:count] = rows
        host["positions"][:count] = positions
        host["lengths"][:count] = positions + 1
        host["slots"][:count] = pages * size + positions % size
        host["entries"][:count] = rows * self._state.tables.shape[1] + positions // size
        host["pages"][:count] = pages
        host["temperatures"][:count], host["shares"][:count] = draws
        self._inputs.send(copy)
        logits = self._graphs.run(shape)
        return None if logits is None else logits[:count]

    def keep(self, place: int, rows: Tensor, drawn: tuple[Tensor, Tensor, Tensor]) -> None:
        """Note what rows have drawn: for their next step, and among the results from `place` on."""
        self._state.last_tokens.index_copy_(0, rows, drawn[0])
        for name, values in zip(_RESULTS, drawn, strict=True):
            self.results.device[name][place : place + len(rows)].copy_(values)

    def keep_known(
        self, place: int, rows: Ints, drawn: tuple[Sequence[int], Sequence[float], Sequence[bool]]
    ) -> None:
        """The same with values that the host knows."""
        device = self._state.tables.device
        values = [
            torch.tensor(given, dtype=self.results.device[name].dtype, device=device)
            for name, given in zip(_RESULTS, drawn, strict=True)
        ]
        self.keep(place, torch.from_numpy(rows).to(device), (values[0], values[1], values[2]))

    def _compute(self, shape: Shape) -> Tensor | None:
        inputs = {name: values[: shape.rows] for name, values in self._inputs.device.items()}
        state, rows = self._state, inputs["rows"]
        state.tables.view(-1).index_copy_(0, inputs["entries"], inputs["pages"])
        tables = state.tables[:, : shape.width].index_select(0, rows)
        context = DecodeContext(self._store, inputs["slots"], tables, inputs["lengths"])
        ids = state.last_tokens.index_select(0, rows)
        hidden = hidden_states(self._model, ids, inputs["positions"], context)
        logits = head_logits(self._model, hidden)
        if shape.kind == _KEEPING:
            return logits
        self.keep(0, rows, sample(logits, inputs["temperatures"], inputs["shares"]))
        return None

    def _rest(self) -> None:
        self._idle(self._inputs.hosts[0], 0)
        self._inputs.send(0)

    def _idle(self, host: dict[str, Array], first: int) -> None:
        """Rows that compute something that nobody reads."""
        host["rows"][first:] = self._state.idle
        host["positions"][first:] = 0
        host["lengths"][first:] = 0
        host["slots"][first:] = self._store.spare_slot
        host["entries"][first:] = self._state.idle * self._state.tables.shape[1]
        host["pages"][first:] = self._store.count
        host["temperatures"][first:] = 1
        host["shares"][first:] = 0


def rows_for(rows: int, most: int) -> int:
    """One of a few sizes that has room for so many rows, of which there are never more than `most`."""
    fitting = [size for size in _SIZES if size >= rows]
    return min(fitting[0] if fitting else -(-rows // 256) * 256, most)
