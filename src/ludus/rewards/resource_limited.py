"""Our own code on hostile input, in a worker process with limits on CPU time and memory.

The limit is CPU time, not wall time: a busy machine makes no answer wrong. Imports and tables that are
made at first use are not counted. Workers are kept for the next call, and end with this process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from ludus.core.failures import LudusError
from ludus.remote.processes import ProcessExecutor
from ludus.remote.threads import WorkerError

T = TypeVar("T")

_MEMORY = 1 << 30
_WALL_SECONDS = 120.0
_CAUSED_BY_INPUT = ("SIGPROF", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP")
"""How a worker dies of what it was given: out of CPU time, out of stack, or a crash in C code."""


class LimitExceeded(LudusError):
    """The function needed more CPU time or memory for this input than it may have."""


@cache
def _workers(process: int) -> ProcessExecutor:
    """Made on first use; `process` keeps a forked child from using its parent's."""
    return ProcessExecutor(max(1, min(4, os.cpu_count() or 1)), name="ludus-limited")


async def run_limited(
    function: Callable[..., T],
    *args: Any,
    cpu_seconds: float,
    memory: int = _MEMORY,
    warm_up: Callable[[], object] | None = None,
) -> T:
    """The result of an importable function, or `LimitExceeded`.

    `warm_up`, importable too, makes a worker ready for the function: it runs once in each, without a limit.
    """
    workers = _workers(os.getpid())
    try:
        return await workers.run(
            limited, function, args, cpu_seconds, memory, warm_up, timeout=_WALL_SECONDS
        )
    except MemoryError as error:
        raise LimitExceeded(f"more than {memory >> 20} MiB of memory") from error
    except WorkerError as error:
        if any(name in str(error) for name in _CAUSED_BY_INPUT):
            raise LimitExceeded(
                f"more than {cpu_seconds:g} s of CPU time, or a crash: {error}"
            ) from error
        raise


_warm: set[Callable[[], object]] = set()
"""Warm-up functions that have run in this worker."""


def limited(
    function: Callable[..., T],
    args: tuple[Any, ...],
    cpu_seconds: float,
    memory: int,
    warm_up: Callable[[], object] | None = None,
) -> T:
    """Runs in the worker. The timer's signal is left to kill the process, even inside C code."""
    if warm_up is not None and warm_up not in _warm:
        warm_up()
        _warm.add(warm_up)
    with contextlib.suppress(ValueError, OSError):  # where the system has no such limit
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
