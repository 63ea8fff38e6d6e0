"""Prompts, new turns and scores: many new tokens of a few rows in one forward pass.

A short pass over plain requests is a captured graph (`short`). Long passes, scores and truncated draws are
launched kernel by kernel; long ones keep the device busy all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.engine.cuda.draws import RowDraws
from ludus.engine.cuda.short import ShortPass, TurnParts
from ludus.engine.cuda.turns import Turns, turns_of
from ludus.engine.head import head_logits
from ludus.engine.runner import sample_chunks, score
from ludus.engine.scheduler import Chunk
from ludus.engine.staging import sent
from ludus.kernels import sample

Ints = npt.NDArray[np.int64]
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
