"""Going over micro-batches when memory is not what was hoped: a failed one is tried again in halves.

One pass after another, on the calling thread. Work that runs out of memory must leave no trace of the failed
pass; the error that it raised, whose frames hold the pass's tensors, is gone before the next attempt.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self, TypeVar

import torch

from ludus.core.failures import LudusError

log = logging.getLogger(__name__)


class Micro(Protocol):
    """A micro-batch of whole rows."""

    @property
    def lengths(self) -> Sequence[int]: ...

    def halves(self) -> tuple[Self, Self]: ...


P = TypeVar("P", bound=Micro)


class Passes:
    """How many tokens a pass may have: as configured, and less once that was too much."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def over(
        self,
        micro_batches: Iterable[P],
        work: Callable[[P], None],
        shrink: Callable[[], bool] = lambda: False,
    ) -> None:
        """Do the work on each, or on its halves where memory does not suffice for the whole.

        Args:
            micro_batches: What to go over. They may have been made before the limit fell.
            work: One pass. When it raises for want of memory, it has to have done nothing.
            shrink: Called when a single row does not fit; true if the next attempt will need less memory.
        """
        for micro_batch in micro_batches:
            waiting = [micro_batch]
            while waiting:
                piece = waiting.pop()
                trouble = None
                if self._fits(piece):
                    trouble = attempt(work, piece)
                    if trouble is None:
                        continue
                    free_cached_memory()
                    self._learn(piece, trouble)
                if len(piece.lengths) > 1:
                    waiting += reversed(piece.halves())
                elif shrink():
                    waiting.append(piece)
                else:
                    raise LudusError(
                        f"a single row of {piece.lengths[0]} tokens does not fit into memory ({trouble}): "
                        "limit the length of episodes (their turns, or the tokens of a turn), or train a "
                        "smaller model or an adapter"
                    )

    def _fits(self, piece: Micro) -> bool:
        return len(piece.lengths) == 1 or sum(piece.lengths) <= self.tokens

    def _learn(self, piece: Micro, trouble: str) -> None:
        """Halve the limit, for good."""
        size = sum(piece.lengths)
        if len(piece.lengths) == 1:
            return
        self.tokens = max(1, min(self.tokens, size) // 2)
        log.warning(
            "a pass over %d tokens ran out of memory (%s); passes have at most %d from now on: set "
            "optimizer.micro_batch_tokens to that to do without the failed attempt",
            size,
            trouble,
            self.tokens,
        )


def attempt(work: Callable[[P], None], piece: P) -> str | None:
    """Do it; what was said if memory ran out, and None if all went well."""
    try:
        work(piece)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device's memory is full; libraries below torch say so in words alone."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = str(error).lower()
    return "out of memory" in words or "cublas_status_alloc_failed" in words


def free_cached_memory() -> None:
    """Give back what nobody holds any more, so that the next attempt finds whole blocks."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
