"""What a reward may return, and what counts of it.

A number counts as it is. A dictionary holds named parts. The part called "reward" is paid and all others are
logged only, as AgentFly has it (`{"reward": f1, "f1": f1, "em": em}`); "total", or the reward's own name, means
the same. Two of them at once are refused. A dictionary without any of them pays the sum of its parts, and says
so once in the log. None, or a part that is None, is unscored, and unscored is not zero. Anything else is a
mistake of the reward, never a score: NaN, an infinity, text, a list.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, MutableMapping, Sequence
from numbers import Real
from typing import Any

_log = logging.getLogger(__name__)

Parts = dict[str, float]

REWARD = "reward"
"""The key of a dictionary whose value is paid; the others are logged."""
TOTAL = "total"
"""The same by another name."""
_SIMILAR = frozenset({REWARD, TOTAL, "score"})
"""verl pays "score". Beside other parts, such a key in another spelling must not become one of a sum."""
TOOLS = "tools"
"""The part that holds what tools paid for single calls."""

RESERVED_NAMES = frozenset({TOTAL, TOOLS})


class ScoreError(ValueError):
    """A reward returned something that is not a score."""


def number(value: Any, what: str) -> float:
    """`value` as a finite float. Scalars of numpy and torch are numbers too; text never is."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ScoreError(f"{what} is not a single number: {error}") from error
    if not isinstance(value, Real):
        raise ScoreError(f"{what} must be a number, not {type(value).__name__} ({value!r:.60})")
    try:
        result = float(value)
    except OverflowError as error:
        raise ScoreError(f"{what} is too large for a float") from error
    if not math.isfinite(result):
        raise ScoreError(f"{what} is {result}; a score must be finite")
    return result


def parts_of(value: Any, name: str) -> Parts:
    """The parts that a reward called `name` returned; what counts stands under its own name."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {name: number(value, f"the score of {name!r}")}
    parts: Parts = {}
    for key, part in value.items():
        if not isinstance(key, str) or not key:
            raise ScoreError(f"{name!r} returned a part called {key!r}; names are non-empty strings")
        if key == TOOLS:
            raise ScoreError(f"{name!r} returned a part called {TOOLS!r}, which tools' own rewards have")
        if part is not None:
            parts[key] = number(part, f"the part {key!r} of {name!r}")
    paid = [key for key in dict.fromkeys((REWARD, TOTAL, name)) if key in value]
    if len(paid) > 1:
        raise ScoreError(f"{name!r} returned both {paid[0]!r} and {paid[1]!r}; which one is paid?")
    if paid:
        own = parts.pop(paid[0], None)
        return parts if own is None else {name: own, **parts}
    if not parts:
        return parts
    if len(parts) > 1:
        similar = [key for key in parts if key.strip().lower() in _SIMILAR]
        if similar:
            raise ScoreError(
                f"{name!r} returned {similar[0]!r} beside other parts: call it {REWARD!r} if that is "
                "paid, or something else if it is one of several that are added up"
            )
        _note_sum(name, ", ".join(parts))
    return {name: number(sum(parts.values()), f"the sum of the parts of {name!r}"), **parts}


_summed: set[str] = set()


def _note_sum(name: str, keys: str) -> None:
    """Say once for each reward that its parts are added up."""
    if name in _summed:
        return
    _summed.add(name)
    _log.warning(
        "the reward %r returned the parts %s and no %r: their sum is paid. Return %r to pay one number and log "
        "the others",
        name,
        keys,
        REWARD,
        REWARD,
    )


def turns_of(values: Any, name: str, count: int, of: str = "actions") -> list[float | None]:
    """One score or None for each of `count` things, in order."""
    if hasattr(values, "tolist"):
        values = values.tolist()  # an array of numpy or torch
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise ScoreError(
            f"{name!r} must return a list, one score for each of the {of}, not {values!r:.60}"
        )
    if len(values) != count:
        raise ScoreError(f"{name!r} returned {len(values)} scores for {count} {of}")
    return [
        None if value is None else number(value, f"score {i} of {name!r}")
        for i, value in enumerate(values)
    ]


def merge(into: MutableMapping[str, float], parts: Mapping[str, float], source: str) -> None:
    """Add `parts`; two different numbers under one name are refused, because one would vanish."""
    for key, value in parts.items():
        if into.setdefault(key, value) != value:
            raise ScoreError(f"{source!r} reports a part {key!r} that another reward reports as well")
