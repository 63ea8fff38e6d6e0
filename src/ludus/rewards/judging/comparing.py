"""Whether a result is the expected one. Pure functions over plain data, run outside the judged process."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

Manner = Literal["exact", "tokens", "lines"]
_WHOLE = re.compile(r"[+-]?[0-9]+")


def same_value(found: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    """Equality of plain data as tests mean it.

    Numbers are equal within `tolerance` (relative, or absolute near 0) as soon as one of them is a float;
    a list and a tuple with equal items are equal, because task files cannot say tuple; True is not 1.
    """
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float | complex) and isinstance(expected, int | float | complex):
        return _same_number(found, expected, tolerance)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(
            same_value(a, b, tolerance) for a, b in zip(found, expected, strict=True)
        )
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same_value(found[key], expected[key], tolerance) for key in expected
        )
    if isinstance(found, set | frozenset) and isinstance(expected, set | frozenset):
        return found == expected
    return type(found) is type(expected) and bool(found == expected)


def _same_number(one: float | complex, other: float | complex, tolerance: float) -> bool:
    if one == other:
        return True
    if type(one) is int and type(other) is int:
        return False
    try:
        distance, size = abs(one - other), max(abs(one), abs(other))
    except OverflowError:
        return False
    if one != one or other != other:
        return one != one and other != other
    return math.isfinite(size) and distance <= tolerance * max(1.0, size)


def same_output(
    found: str, expected: str, manner: Manner = "tokens", tolerance: float | None = None
) -> bool:
    """Whether a program wrote what it should.

    "exact" compares every character but line ends at the end, "lines" line by line without white space at
    the ends of lines and of the text, "tokens" the words alone. With `tolerance`, words that are both
    numbers are equal within it, unless both are whole: these are the same number, or not.
    """
    if manner == "exact":
        return _unix(found).rstrip("\n") == _unix(expected).rstrip("\n")
    if manner == "tokens":
        return _same_words(found.split(), expected.split(), tolerance)
    ours, theirs = (_unix(text).rstrip().split("\n") for text in (found, expected))
    return len(ours) == len(theirs) and all(
        _same_words(a.rstrip().split(" "), b.rstrip().split(" "), tolerance)
        for a, b in zip(ours, theirs, strict=True)
    )


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


def _same_words(found: list[str], expected: list[str], tolerance: float | None) -> bool:
    return len(found) == len(expected) and all(
        a == b or (tolerance is not None and _close(a, b, tolerance))
        for a, b in zip(found, expected, strict=True)
    )


def _close(found: str, expected: str, tolerance: float) -> bool:
    if len(found) > 400 or len(expected) > 400:
        return False
    if _WHOLE.fullmatch(found) and _WHOLE.fullmatch(expected):
        return int(found) == int(expected)
    try:
        one, other = float(found), float(expected)
    except ValueError:
        return False
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
