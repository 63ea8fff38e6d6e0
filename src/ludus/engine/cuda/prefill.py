"""Prompts, new turns and scores: many new tokens of a few rows in one forward pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.cuda.contexts import PrefillContext
from ludus.engine.cuda.decode import DecodeStep, RowState
from ludus.engine.cuda.draws import RowDraws
from ludus.engine.cuda.pages import FixedStore
from ludus.engine.cuda.staging import sent
from ludus.engine.forward import hidden_states
from ludus.engine.head import head_logits
from ludus.engine.runner import flat_batch, sample_chunks, score
from ludus.engine.scheduler import Chunk
from ludus.kernels import sample

Ints = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)

_FEWEST_TOKENS = 64
"""A forward pass of so few tokens is not split any further when memory runs out."""


class PrefillStep:
    """Runs the chunks of a step that are not plain decoding, and keeps what they draw with the decoder's."""

    def __init__(
        self, model: nn.Module, store: FixedStore, state: RowState, decode: DecodeStep, draws: RowDraws
    ) -> None:
        self._model, self._store = model, store
        self._state, self._decode, self._draws = state, decode, draws
        self._device = state.tables.device
        self._most_tokens: int | None = None

    def launch(self, chunks: Sequence[Chunk], tables: Ints) -> list[tuple[Chunk, Tensor]]:
        """Begin the step; the scores of the chunks that score. First tokens follow the decoder's results."""
        place = self._state.idle
        scores: list[tuple[Chunk, Tensor]] = []
        todo = [list(chunks)]
        while todo:
            part = todo.pop()
            if self._most_tokens is not None and _tokens(part) > self._most_tokens:
                todo += reversed(halves(part))
                continue
            try:
                scores += self._forward(part, tables, place)
            except torch.OutOfMemoryError:
                if _tokens(part) <= _FEWEST_TOKENS:
                    raise
                self._shrink(_tokens(part) // 2)
                todo.append(part)
                continue
            place += sum(chunk.samples for chunk in part)
        return scores

    def _shrink(self, tokens: int) -> None:
        self._most_tokens = tokens
        torch.cuda.empty_cache()
        _log.warning(
            "a forward pass ran out of memory: at most %d tokens are computed at once from now on; lower "
            "engine.tokens_per_step or engine.memory to avoid this",
            tokens,
        )

    def _forward(self, chunks: list[Chunk], tables: Ints, place: int) -> list[tuple[Chunk, Tensor]]:
        ids, positions, batch = flat_batch(chunks, tables, self._store.page_size)
        starts = np.concatenate([[0], np.cumsum(batch.counts)])
        rows = np.array([chunk.request.row for chunk in chunks])
        drawing = np.flatnonzero([chunk.samples for chunk in chunks])
        if len(drawing):
            self._draws.note([chunks[i] for i in drawing])
        temperatures, shares = self._draws.at(rows[drawing], batch.lengths[drawing])
        there = sent(
            [
                ids, positions, batch.slots, rows, starts[1:][drawing] - 1, rows[drawing], shares,
                batch.tables.astype(np.int32), starts.astype(np.int32), batch.lengths.astype(np.int32),
                temperatures,
            ],
            self._device,
        )  # fmt: skip
        ids_T, positions_T, slots_T, rows_R, last_S, rows_S, shares_S, tables_RP = there[:8]
        if self._state.widen(tables_RP.shape[1]):
            self._decode.graphs.clear()
        self._state.tables[:, : tables_RP.shape[1]].index_copy_(0, rows_R, tables_RP)
        longest = int(batch.counts.max())
        context = PrefillContext(self._store, slots_T, tables_RP, there[8], there[9], longest)
        hidden_TD = hidden_states(self._model, ids_T, positions_T, context)
        if len(drawing):
            logits_SV = head_logits(self._model, hidden_TD.index_select(0, last_S))
            if self._draws.has_truncated(rows[drawing]):
                drawn = sample_chunks(logits_SV, [chunks[i] for i in drawing])
                self._decode.keep_known(place, rows[drawing], drawn)
            else:
                self._decode.keep(place, rows_S, sample(logits_SV, there[10], shares_S))
        return [
            (chunk, score(self._model, chunk, hidden_TD[start:stop]))
            for chunk, start, stop in zip(chunks, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
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
