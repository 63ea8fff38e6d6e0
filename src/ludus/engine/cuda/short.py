"""A forward pass over a few new turns, over static buffers: what a graph captures beside the decode step.

Most steps of an agent's episodes have a new turn or two beside hundreds of rows that decode. Launched kernel by
kernel, that would take the host several times as long as it takes the device. Tokens, rows and draws that a
captured size has too many are idle: such a token is written where nobody reads, and what its row gives, nobody
asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ludus.engine.cuda.contexts import PrefillContext
from ludus.engine.cuda.decode import DecodeStep, RowState
from ludus.engine.cuda.graphs import Shape, StepGraphs, wide_enough
from ludus.engine.cuda.pages import FixedStore
from ludus.engine.cuda.turns import OF_ROWS, OF_TOKENS, Turns
from ludus.engine.forward import hidden_states
from ludus.engine.head import head_logits
from ludus.engine.staging import Mirror, sent
from ludus.kernels import sample

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
