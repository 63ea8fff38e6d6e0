"""`ludus.log("custom/x", value)`: numbers that user code logs, from any thread of a run or from its workers.

A run takes them at the end of each step, as means. Sums are exact (`math.fsum`), so that the order in which
threads came decides nothing. A worker process sends its numbers with the result of the call (`process_worker`).
Where no run is open, as in `ludus eval`, numbers are checked and dropped.
"""

from __future__ import annotations

import math
import os
import re
import threading
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import SupportsFloat

from ludus.core.failures import Boundary, InfraError
from ludus.remote import process_worker

MOST_NAMES, MOST_CHARS = 64, 80
"""A name may come from what a model wrote, and each is a metric for ever."""
_NAME = re.compile(r"custom(/[A-Za-z0-9_.-]+)+")

Values = dict[str, "array[float]"]

_lock = threading.Lock()
_values: Values = {}
_names: set[str] = set()
_is_open = process_worker.is_worker
_is_refused = "LUDUS_KEY" in os.environ
"""A program that a run plays is given this key."""


def log(name: str, value: SupportsFloat) -> None:
    """Log a number as `custom/...`: the mean of a step's is in that step's metrics.

    From tools, rewards, environments, agents, experts, hooks, estimators and losses. What cannot be logged is
    an infrastructure failure: it is no mistake of the model's.
    """
    if _is_refused:
        raise _error(
            f"{name!r:.100} cannot be logged here, in a tool server, a Ray actor or a program, which are not "
            "the run's process: log it in the run's, or return the number, such as a part of the reward"
        )
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MOST_CHARS:
        raise _error(
            f"a name is custom/ and then letters, digits and ._-/ (at most {MOST_CHARS} characters), not "
            f"{name!r:.100}"
        )
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _error(f"the value of {name} must be a finite number, not {value!r:.100}")
    add({name: array("d", [number])})


def add(values: Mapping[str, array[float]]) -> None:
    """Take in values that were checked, of this process or of a worker's."""
    with _lock:
        _names.update(values)
        if len(_names) > MOST_NAMES:
            _names.difference_update(values.keys() - _values.keys())
            raise _error(
                f"{max(values)} is one name too many: a run logs at most {MOST_NAMES}; what varies belongs "
                "into the value"
            )
        for name, found in values.items() if _is_open else ():
            _values.setdefault(name, array("d")).extend(found)


def swap(values: Values | None = None) -> Values:
    """What has been logged since the last swap; `values` are in its place now."""
    global _values
    with _lock:
        found, _values = _values, values or {}
    return found


def means(values: Mapping[str, array[float]]) -> dict[str, float]:
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


@contextmanager
def opened() -> Iterator[None]:
    """Keep what is logged in here, beginning with nothing."""
    global _is_open, _is_refused
    swap()
    _names.clear()
    _is_open, _is_refused = True, False
    try:
        yield
    finally:
        _is_open = False


def refuse() -> None:
    """From now on nothing can be logged in this process, which is neither a run's nor one of its workers."""
    global _is_refused
    _is_refused = True


def _error(text: str) -> InfraError:
    return InfraError(Boundary.AGENT, f"ludus.log: {text}", retriable=False, kind="LogError")
