"""The garbage collector, kept from walking over what is there to stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0


@contextmanager
def settled_heap() -> Iterator[None]:
    """What exists now is left alone by the garbage collector until the end.

    A process that has imported torch holds a million objects that never become garbage. A full collection walks
    over all of them, and for that fifth of a second no episode goes on and no GPU is given work. What is made
    inside is collected as ever; only a cycle among older objects has to wait. May be nested, and entered by
    several threads.
    """
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            gc.collect()
            gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.unfreeze()
