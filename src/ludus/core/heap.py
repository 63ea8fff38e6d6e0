"""The garbage collector, kept from walking over what is there to stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()
_inside = 0


@contextmanager
def settled_heap() -> Iterator[None]:
    """What exists now is left alone by the garbage collector until the end.

    A process that has imported torch holds a million objects that never become garbage. A full collection walks
    over all of them, and for that fifth of a second no episode goes on and no GPU is given work. What is made
    inside is collected as ever; only a cycle among older objects has to wait. May be nested, and entered by
    several threads. A heap that somebody else has frozen stays as it is.
    """
    with _lock:
        is_ours = _begin()
    try:
        yield
    finally:
        if is_ours:
            with _lock:
                _end()


def _begin() -> bool:
    """Whether what is frozen now is ours to thaw."""
    global _inside
    if _inside == 0:
        if gc.get_freeze_count() > 0:
            return False
        gc.collect()
        gc.freeze()
    _inside += 1
    return True


def _end() -> None:
    global _inside
    _inside -= 1
    if _inside == 0:
        gc.unfreeze()
