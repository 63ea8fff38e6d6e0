"""The new tokens of some rows, end to end, and what is to be known of them: T tokens, R rows, S that draw."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.cuda.decode import DecodeStep, RowDraws, RowState
from ludus.engine.cuda.graphs import Shape, StepGraphs, wide_enough
from ludus.engine.cuda.kv_cache import FixedStore
from ludus.engine.model_runner import flat_batch, head_logits, hidden_states, sample_chunks, score
from ludus.engine.paged_attention import PrefillContext
from ludus.engine.scheduler import Chunk
from ludus.kernels import sample
from ludus.kernels.device import Array, Mirror, sent

Ints = npt.NDArray[np.int64]

OF_TOKENS: dict[str, Any] = {"ids_T": np.int64, "positions_T": np.int64, "slots_T": np.int64}
OF_ROWS: dict[str, Any] = {
    "rows_R": np.int64,
    "lengths_R": np.int32,
    "starts_R1": np.int32,
    "last_S": np.int64,
    "drawing_S": np.int64,
    "temperatures_S": np.float32,
    "shares_S": np.float64,
}


@dataclass(frozen=True, slots=True)
class Turns:
    """What a forward pass over prompts and new turns reads. Its names are those of the tables above."""

    chunks: Sequence[Chunk]
    drawing: list[Chunk]
    """Those that draw a token."""
    ids_T: Array
    positions_T: Array
    slots_T: Array
    rows_R: Array
    lengths_R: Array
    """Tokens of each row, the new ones included."""
    starts_R1: Array
    """Where each row's new tokens begin; at the end, how many there are."""
    tables_RP: Array
    last_S: Array
    """Where the last new token of a row that draws lies."""
    drawing_S: Array
    """Its row."""
    temperatures_S: Array
    shares_S: Array

    @property
    def arrays(self) -> dict[str, Array]:
        names = (field.name for field in fields(self) if field.name in OF_TOKENS | OF_ROWS)
        return {name: getattr(self, name) for name in names}

    @property
    def tokens(self) -> int:
        return len(self.ids_T)

    @property
    def is_plain(self) -> bool:
        """Whether all that is wanted are tokens drawn from whole distributions."""
        return not any(c.request.is_score or c.request.sampling.is_truncated for c in self.chunks)


def turns_of(chunks: Sequence[Chunk], tables: Ints, page_size: int, draws: RowDraws) -> Turns:
    """The turns of these chunks; `tables` are all rows' pages."""
    ids_T, positions_T, batch = flat_batch(chunks, tables, page_size)
    starts_R1 = np.concatenate([[0], np.cumsum(batch.counts)])
    rows_R = np.array([chunk.request.row for chunk in chunks])
    places = np.flatnonzero([chunk.samples for chunk in chunks])
    drawing = [chunk for chunk in chunks if chunk.samples]
    draws.note(drawing)
    temperatures_S, shares_S = draws.at(rows_R[places], batch.lengths[places])
    return Turns(
        chunks=chunks,
        drawing=drawing,
        ids_T=ids_T,
        positions_T=positions_T,
        slots_T=batch.slots,
        rows_R=rows_R,
        lengths_R=batch.lengths.astype(np.int32),
        starts_R1=starts_R1.astype(np.int32),
        tables_RP=batch.tables.astype(np.int32),
        last_S=starts_R1[1:][places] - 1,
        drawing_S=rows_R[places],
        temperatures_S=temperatures_S,
        shares_S=shares_S,
    )


# Short prefill as a CUDA graph. Most steps of an agent's episodes have a new turn or two beside hundreds of
# rows that decode. Launched kernel by kernel, that takes the host several times as long as the device. Surplus
# tokens and rows of a captured size are idle: they write to the spare block, and nobody reads what they give.


SIZES = ((64, 4), (128, 8), (256, 16), (512, 32), (1024, 64), (1536, 64), (2048, 64))
"""(tokens, rows) that graphs are captured for."""
KIND = "new turns"


@dataclass(frozen=True, slots=True)
class TurnParts:
    """What a pass over new turns works with, short or long."""

    model: nn.Module
    store: FixedStore
    state: RowState
    decode: DecodeStep
    graphs: StepGraphs

    @property
    def device(self) -> torch.device:
        return self.state.tables.device

    def keep_tables(self, rows_R: Tensor, tables_RP: Tensor) -> None:
        """Note the rows' pages for this pass and the steps that follow."""
        if self.state.keep_tables(rows_R, tables_RP):
            self.graphs.clear()

    def hidden_states(self, inputs: dict[str, Tensor], tables_RP: Tensor) -> Tensor:
        """[T, D]: the last hidden states of new tokens, whose keys and values go to their pages on the way."""
        names = ("slots_T", "starts_R1", "lengths_R")
        slots_T, starts_R1, lengths_R = (inputs[name] for name in names)
        context = PrefillContext(self.store, slots_T, tables_RP, starts_R1, lengths_R)
        return hidden_states(self.model, inputs["ids_T"], inputs["positions_T"], context)


class ShortPass:
    """The pass and its buffers. First tokens are kept behind the decoder's results."""

    def __init__(self, parts: TurnParts, copies: int) -> None:
        self._parts = parts
        self._state, self._graphs = parts.state, parts.graphs
        tokens, rows = SIZES[-1]
        self._tokens = Mirror(OF_TOKENS, tokens, parts.device, copies)
        self._rows = Mirror(OF_ROWS, rows + 1, parts.device, copies)
        parts.graphs.serve(KIND, self._compute, self._rest)

    def size_for(self, turns: Turns) -> tuple[int, int] | None:
        """(tokens, rows) of the smallest pass that has room for these turns, if there is any."""
        if not turns.is_plain or self._graphs.has_refused(KIND):
            return None
        most = self._state.idle
        fitting = (
            (tokens, min(rows, most))
            for tokens, rows in SIZES
            if tokens >= turns.tokens and min(rows, most) >= len(turns.chunks)
        )
        return next(fitting, None)

    def launch(self, copy: int, turns: Turns, size: tuple[int, int]) -> None:
        """Begin the pass; the host's buffers of a copy are free again when the step has been received."""
        tables_RP, rows_R = sent([turns.tables_RP, turns.rows_R], self._parts.device)
        self._parts.keep_tables(rows_R, tables_RP)
        width = wide_enough(tables_RP.shape[1], self._parts.store.page_size)
        shape = self._graphs.choose(Shape(KIND, *size, width))
        self._idle(copy)
        for name, values in turns.arrays.items():
            mirror = self._tokens if name in OF_TOKENS else self._rows
            mirror.hosts[copy][name][: len(values)] = values
        # Rows that are not there begin and end where the last one ends.
        self._rows.hosts[copy]["starts_R1"][len(turns.chunks) :] = turns.tokens
        self._tokens.send(copy)
        self._rows.send(copy)
        self._graphs.run(shape)

    def _compute(self, shape: Shape) -> None:
        inputs = {name: values[: shape.tokens] for name, values in self._tokens.device.items()}
        inputs |= {name: values[: shape.rows] for name, values in self._rows.device.items()}
        inputs["starts_R1"] = self._rows.device["starts_R1"][: shape.rows + 1]
        tables_RP = self._state.tables[:, : shape.width].index_select(0, inputs["rows_R"])
        hidden_TD = self._parts.hidden_states(inputs, tables_RP)
        logits_RV = head_logits(self._parts.model, hidden_TD.index_select(0, inputs["last_S"]))
        drawn = sample(logits_RV, inputs["temperatures_S"], inputs["shares_S"])
        self._parts.decode.keep(self._state.idle, inputs["drawing_S"], drawn)

    def _rest(self) -> None:
        self._idle(0)
        self._tokens.send(0)
        self._rows.send(0)

    def _idle(self, copy: int) -> None:
        for mirror in (self._tokens, self._rows):
            for values in mirror.hosts[copy].values():
                values[:] = 0
        self._tokens.hosts[copy]["slots_T"][:] = self._parts.store.spare_slot
        rows = self._rows.hosts[copy]
        rows["rows_R"][:] = rows["drawing_S"][:] = self._state.idle
        rows["temperatures_S"][:] = 1


# --- prefill ---
# Prompts, new turns and scores: many new tokens of a few rows in one forward pass.
#
# A short pass over plain requests is a captured graph (`short`). Long passes, scores and truncated draws are
# launched kernel by kernel; long ones keep the device busy all the same.

Scores = list[tuple[Chunk, Tensor]]

_log = logging.getLogger(__name__)

_FEWEST_TOKENS = 64
"""A forward pass of so few tokens is not split any further when memory runs out."""


class PrefillStep:
    """Runs the chunks of a step that are not plain decoding, and keeps what they draw with the decoder's."""

    def __init__(self, parts: TurnParts, draws: RowDraws, copies: int) -> None:
        self._parts, self._draws = parts, draws
        self._short = ShortPass(parts, copies)
        self._most_tokens: int | None = None
        self._has_room = True
        """For short passes, which are padded."""

    def launch(self, copy: int, chunks: Sequence[Chunk], tables: Ints) -> Scores:
        """Begin the step; the scores of the chunks that score. First tokens follow the decoder's results."""
        place, scores = self._parts.state.idle, Scores()
        todo = [list(chunks)]
        may_be_short = self._has_room
        while todo:
            part = todo.pop()
            count = _tokens(part)
            if self._most_tokens is not None and count > self._most_tokens:
                todo += reversed(halves(part))
                may_be_short = False  # there is one set of static buffers a step
                continue
            turns = turns_of(part, tables, self._parts.store.page_size, self._draws)
            size = self._short.size_for(turns) if may_be_short else None
            has_failed = False
            try:
                if size is not None:
                    self._short.launch(copy, turns, size)
                else:
                    scores += self._launch_long(turns, place)
            except torch.OutOfMemoryError:
                if size is None and count <= _FEWEST_TOKENS:
                    raise
                has_failed = True
            if has_failed:
                torch.cuda.empty_cache()  # not before the error, whose frames hold the pass, is gone
                may_be_short = False
                if size is None:
                    self._shrink(count // 2)
                else:
                    self._leave_padding()
                todo.append(part)
            else:
                place += len(turns.drawing)
        return scores

    def forget_limit(self) -> None:
        """What ran out of memory once may fit now: somebody else may have needed the room then."""
        self._most_tokens, self._has_room = None, True

    def _shrink(self, tokens: int) -> None:
        self._most_tokens = tokens
        _log.warning(
            "a forward pass ran out of memory: at most %d tokens are computed at once until the next pause; "
            "lower engine.tokens_per_step or engine.memory to avoid this",
            tokens,
        )

    def _leave_padding(self) -> None:
        self._has_room = False
        _log.warning(
            "a padded pass over new turns ran out of memory: they are computed without padding and graphs "
            "until the next pause, which is slower; lower engine.memory to avoid this"
        )

    def _launch_long(self, turns: Turns, place: int) -> Scores:
        *values, tables_RP = sent([*turns.arrays.values(), turns.tables_RP], self._parts.device)
        inputs = dict(zip(turns.arrays, values, strict=True))
        model, decode = self._parts.model, self._parts.decode
        self._parts.keep_tables(inputs["rows_R"], tables_RP)
        hidden_TD = self._parts.hidden_states(inputs, tables_RP)
        if turns.drawing:
            logits_SV = head_logits(model, hidden_TD.index_select(0, inputs["last_S"]))
            if any(chunk.request.sampling.is_truncated for chunk in turns.drawing):
                drawn = sample_chunks(logits_SV, turns.drawing)
                decode.keep_known(place, turns.drawing_S, drawn)
            else:
                drawn_S = sample(logits_SV, inputs["temperatures_S"], inputs["shares_S"])
                decode.keep(place, inputs["drawing_S"], drawn_S)
        starts = turns.starts_R1.tolist()
        return [
            (chunk, score(model, chunk, hidden_TD[start:stop]))
            for chunk, start, stop in zip(turns.chunks, starts[:-1], starts[1:], strict=True)
            if chunk.request.is_score
        ]


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
