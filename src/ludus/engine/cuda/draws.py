"""What each row draws its tokens with, as arrays: set when a request gets its row, read in every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ludus.engine.sampling import seed_of, shares_at
from ludus.engine.scheduler import Chunk

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
