"""Prompts, new turns and scores: many new tokens of a few rows in one forward pass.

Most steps of an agent's episodes have a new turn or two beside hundreds of rows that decode. Launched kernel by
kernel, that would take the host several times as long as it takes the device; so a short pass over plain
requests is a captured graph like the decode step. Long passes keep the device busy either way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.cuda.contexts import PrefillContext
from ludus.engine.cuda.decode import DecodeStep, RowState
from ludus.engine.cuda.draws import RowDraws
from ludus.engine.cuda.graphs import Shape, StepGraphs, wide_enough
from ludus.engine.cuda.pages import FixedStore
from ludus.engine.forward import hidden_states
from ludus.engine.head import head_logits
from ludus.engine.runner import flat_batch, sample_chunks, score
from ludus.engine.scheduler import Chunk
from ludus.engine.staging import Array, Mirror, sent
from ludus.kernels import sample

Ints = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)

_FEWEST_TOKENS = 64
"""A forward pass of so few tokens is not split any further when memory runs out."""
_SIZES = ((64, 4), (128, 8), (256, 16), (512, 32), (1024, 64), (2048, 64))
"""(tokens, rows) that graphs are captured for."""
_KIND = "prefill"

_OF_TOKENS: dict[str, Any] = {"ids": np.int64, "positions": np.int64, "slots": np.int64}
_OF_ROWS: dict[str, Any] = {
    "rows": np.int64,
    "last": np.int64,
    "drawing": np.int64,
    "shares": np.float64,
    "starts": np.int32,
    "lengths": np.int32,
    "temperatures": np.float32,
}


@dataclass(frozen=True, slots=True)
class _Pass:
    """The new tokens of some chunks end to end, and what is to be known of them: T tokens, R rows, S draws."""

    chunks: Sequence[Chunk]
    drawing: list[Chunk]
    arrays: dict[str, Array]
    """ids_T, positions_T, slots_T, rows_R, starts_R1, lengths_R; of the rows that draw: the place of their last
    token, their number, temperature and share."""
    tables_RP: npt.NDArray[np.int32]

    @property
    def tokens(self) -> int:
        return len(self.arrays["ids"])

    @property
    def is_plain(self) -> bool:
        """Whether all that is wanted of it are tokens drawn from whole distributions."""
        return not any(c.request.is_score or c.request.sampling.is_truncated for c in self.chunks)


class PrefillStep:
    """Runs the chunks of a step that are not plain decoding, and keeps what they draw with the decoder's."""

    def __init__(
        self,
        model: nn.Module,
        store: FixedStore,
        state: RowState,
        decode: DecodeStep,
        draws: RowDraws,
        graphs: StepGraphs,
        copies: int,
    ) -> None:
        self._model, self._store = model, store
        self._state, self._decode, self._draws, self._graphs = state, decode, draws, graphs
        self._device = state.tables.device
        self._most_tokens: int | None = None
        tokens, rows = _SIZES[-1]
        self._tokens = Mirror(_OF_TOKENS, tokens, self._device, copies)
        self._rows = Mirror(_OF_ROWS, rows + 1, self._device, copies)
        graphs.serve(_KIND, self._compute_static, self._rest)

    def launch(self, copy: int, chunks: Sequence[Chunk], tables: Ints) -> list[tuple[Chunk, Tensor]]:
        """Begin the step; the scores of the chunks that score. First tokens follow the decoder's results."""
        place, total = self._state.idle, _tokens(chunks)
        scores: list[tuple[Chunk, Tensor]] = []
        todo = [list(chunks)]
        while todo:
            part = todo.pop()
            size = _tokens(part)
            if self._most_tokens is not None and size > self._most_tokens:
                todo += reversed(halves(part))
                continue
            given = self._pass(part, tables)
            # There is one set of static buffers a step, so what has been cut in parts does without.
            if size == total and self._launch_short(copy, given):
                break
            try:
                scores += self._launch_long(given, place)
            except torch.OutOfMemoryError:
                if size <= _FEWEST_TOKENS:
                    raise
                self._shrink(size // 2)
                todo.append(part)
                continue
            place += len(given.drawing)
        return scores

    def forget_limit(self) -> None:
        """What ran out of memory once may fit now: somebody else may have needed the room then."""
        self._most_tokens = None

    def _shrink(self, tokens: int) -> None:
        self._most_tokens = tokens
        torch.cuda.empty_cache()
        _log.warning(
            "a forward pass ran out of memory: at most %d tokens are computed at once until the next pause; "
            "lower engine.tokens_per_step or engine.memory to avoid this",
            tokens,
        )

    def _pass(self, chunks: Sequence[Chunk], tables: Ints) -> _Pass:
        ids, positions, batch = flat_batch(chunks, tables, self._store.page_size)
        starts = np.concatenate([[0], np.cumsum(batch.counts)])
        rows = np.array([chunk.request.row for chunk in chunks])
        places = np.flatnonzero([chunk.samples for chunk in chunks])
        drawing = [chunk for chunk in chunks if chunk.samples]
        self._draws.note(drawing)
        temperatures, shares = self._draws.at(rows[places], batch.lengths[places])
        arrays: dict[str, Array] = {
            "ids": ids,
            "positions": positions,
            "slots": batch.slots,
            "rows": rows,
            "last": starts[1:][places] - 1,
            "drawing": rows[places],
            "shares": shares,
            "starts": starts.astype(np.int32),
            "lengths": batch.lengths.astype(np.int32),
            "temperatures": temperatures,
        }
        return _Pass(chunks, drawing, arrays, batch.tables.astype(np.int32))

    def _keep_tables(self, rows_R: Tensor, tables_RP: Tensor) -> None:
        """Note the rows' pages for this pass and the steps that follow."""
        if self._state.widen(tables_RP.shape[1]):
            self._graphs.clear()
        self._state.tables[:, : tables_RP.shape[1]].index_copy_(0, rows_R, tables_RP)

    def _launch_long(self, given: _Pass, place: int) -> list[tuple[Chunk, Tensor]]:
        *values, tables_RP = sent([*given.arrays.values(), given.tables_RP], self._device)
        inputs = dict(zip(given.arrays, values, strict=True))
        self._keep_tables(inputs["rows"], tables_RP)
        hidden_TD = self._hidden(inputs, tables_RP)
        if given.drawing:
            logits_SV = head_logits(self._model, hidden_TD.index_select(0, inputs["last"]))
            if any(chunk.request.sampling.is_truncated for chunk in given.drawing):
                drawn = sample_chunks(logits_SV, given.drawing)
                self._decode.keep_known(place, given.arrays["drawing"], drawn)
            else:
                drawn_S = sample(logits_SV, inputs["temperatures"], inputs["shares"])
                self._decode.keep(place, inputs["drawing"], drawn_S)
        starts = given.arrays["starts"].tolist()
        return [
            (chunk, score(self._model, chunk, hidden_TD[start:stop]))
            for chunk, start, stop in zip(given.chunks, starts[:-1], starts[1:], strict=True)
            if chunk.request.is_score
        ]

    def _hidden(self, inputs: dict[str, Tensor], tables_RP: Tensor) -> Tensor:
        context = PrefillContext(
            self._store, inputs["slots"], tables_RP, inputs["starts"], inputs["lengths"]
        )
        return hidden_states(self._model, inputs["ids"], inputs["positions"], context)

    def _size_for(self, given: _Pass) -> tuple[int, int] | None:
        """(tokens, rows) of the smallest static pass that has room for this one, if there is any."""
        count = len(given.chunks)
        if not given.is_plain:
            return None
        fitting = (
            (tokens, min(rows, self._state.idle))
            for tokens, rows in _SIZES
            if tokens >= given.tokens and min(rows, self._state.idle) >= count
        )
        return next(fitting, None)

    def _launch_short(self, copy: int, given: _Pass) -> bool:
        """Begin a pass over static buffers; false if there are none for it, or no memory to capture it."""
        size = self._size_for(given)
        if size is None:
            return False
        tables_RP, rows_R = sent([given.tables_RP, given.arrays["rows"]], self._device)
        self._keep_tables(rows_R, tables_RP)
        width = wide_enough(tables_RP.shape[1], self._store.page_size)
        try:
            shape = self._graphs.choose(Shape(_KIND, *size, width))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False
        self._idle(copy)
        for mirror in (self._tokens, self._rows):
            for name, place in mirror.hosts[copy].items():
                values = given.arrays[name]
                place[: len(values)] = values
        # Rows that are not there begin and end where the last one ends.
        self._rows.hosts[copy]["starts"][len(given.chunks) :] = given.tokens
        self._tokens.send(copy)
        self._rows.send(copy)
        self._graphs.run(shape)
        return True

    def _compute_static(self, shape: Shape) -> None:
        inputs = {name: values[: shape.tokens] for name, values in self._tokens.device.items()}
        inputs |= {name: values[: shape.rows] for name, values in self._rows.device.items()}
        inputs["starts"] = self._rows.device["starts"][: shape.rows + 1]
        tables_RP = self._state.tables[:, : shape.width].index_select(0, inputs["rows"])
        hidden_TD = self._hidden(inputs, tables_RP)
        logits_RV = head_logits(self._model, hidden_TD.index_select(0, inputs["last"]))
        drawn = sample(logits_RV, inputs["temperatures"], inputs["shares"])
        self._decode.keep(self._state.idle, inputs["drawing"], drawn)

    def _rest(self) -> None:
        self._idle(0)
        self._tokens.send(0)
        self._rows.send(0)

    def _idle(self, copy: int) -> None:
        """Tokens that are written where nobody reads, rows without any, draws that nobody asked for."""
        tokens, rows = self._tokens.hosts[copy], self._rows.hosts[copy]
        for name in ("ids", "positions"):
            tokens[name][:] = 0
        tokens["slots"][:] = self._store.spare_slot
        for name in ("rows", "drawing"):
            rows[name][:] = self._state.idle
        for name in ("last", "starts", "lengths", "shares"):
            rows[name][:] = 0
        rows["temperatures"][:] = 1


def _tokens(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.stop - chunk.start for chunk in chunks)


def halves(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Two parts of about as many tokens, to be computed in this order; a chunk may be cut in two."""
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
