"""The new tokens of some rows, end to end, and what is to be known of them: T tokens, R rows, S that draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.engine.cuda.draws import RowDraws
from ludus.engine.runner import flat_batch
from ludus.engine.scheduler import Chunk
from ludus.engine.staging import Array

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
