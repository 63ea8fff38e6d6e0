"""A forward pass over a few new turns, over static buffers: what a graph captures beside the decode step.

Most steps of an agent's episodes have a new turn or two beside hundreds of rows that decode. Launched kernel by
kernel, that would take the host several times as long as it takes the device. Tokens, rows and draws that a
captured size has too many are idle: such a token is written where nobody reads, and what its row gives, nobody
asked for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
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

Ints = npt.NDArray[np.int64]

SIZES = ((64, 4), (128, 8), (256, 16), (512, 32), (1024, 64), (1536, 64), (2048, 64))
"""(tokens, rows) that graphs are captured for."""
KIND = "new turns"


class ShortPass:
    """The pass and its buffers. First tokens are kept behind the decoder's results."""

    def __init__(
        self,
        model: nn.Module,
        store: FixedStore,
        state: RowState,
        decode: DecodeStep,
        graphs: StepGraphs,
        copies: int,
    ) -> None:
        self._model, self._store = model, store
        self._state, self._decode, self._graphs = state, decode, graphs
        tokens, rows = SIZES[-1]
        self._tokens = Mirror(OF_TOKENS, tokens, state.tables.device, copies)
        self._rows = Mirror(OF_ROWS, rows + 1, state.tables.device, copies)
        graphs.serve(KIND, self._compute, self._rest)

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
        tables_RP, rows_R = sent([turns.tables_RP, turns.rows_R], self._state.tables.device)
        if self._state.keep_tables(rows_R, tables_RP):
            self._graphs.clear()
        width = wide_enough(tables_RP.shape[1], self._store.page_size)
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
        hidden_TD = turn_states(self._model, self._store, inputs, tables_RP)
        logits_RV = head_logits(self._model, hidden_TD.index_select(0, inputs["last_S"]))
        drawn = sample(logits_RV, inputs["temperatures_S"], inputs["shares_S"])
        self._decode.keep(self._state.idle, inputs["drawing_S"], drawn)

    def _rest(self) -> None:
        self._idle(0)
        self._tokens.send(0)
        self._rows.send(0)

    def _idle(self, copy: int) -> None:
        for mirror in (self._tokens, self._rows):
            for values in mirror.hosts[copy].values():
                values[:] = 0
        self._tokens.hosts[copy]["slots_T"][:] = self._store.spare_slot
        rows = self._rows.hosts[copy]
        rows["rows_R"][:] = rows["drawing_S"][:] = self._state.idle
        rows["temperatures_S"][:] = 1


def turn_states(
    model: nn.Module, store: FixedStore, inputs: dict[str, Tensor], tables_RP: Tensor
) -> Tensor:
    """[T, D]: the last hidden states of new tokens, whose keys and values go to their pages on the way."""
    names = ("starts_R1", "lengths_R")
    context = PrefillContext(store, inputs["slots_T"], tables_RP, *(inputs[name] for name in names))
    return hidden_states(model, inputs["ids_T"], inputs["positions_T"], context)
