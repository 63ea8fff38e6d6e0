"""A stand-in for `pytest` that tests can import: `raises`, `approx`, `fail`, `mark.parametrize`."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from typing import Any


class _Raises:
    def __init__(self, expected: Any, match: str | None = None) -> None:
        self._expected, self._match = expected, match
        self.value: BaseException | None = None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            raise AssertionError(f"{self._expected!r} was not raised")
        if not isinstance(error, self._expected):
            return False
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {self._match!r}")
        self.value = error
        return True


class _Approx:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self._expected = expected
        self._rel = rel if rel is not None else (0.0 if abs is not None else 1e-6)
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, other: object) -> bool:
        return self._close(self._expected, other)

    def _close(self, expected: Any, found: Any) -> bool:
        if isinstance(expected, dict):
            same = isinstance(found, dict) and expected.keys() == found.keys()
            return same and all(self._close(expected[key], found[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            same = isinstance(found, (list, tuple)) and len(expected) == len(found)
            return same and all(map(self._close, expected, found))
        if isinstance(expected, (int, float)) and isinstance(found, (int, float)):
            return expected == found or math.isclose(
                expected, found, rel_tol=self._rel, abs_tol=self._abs
            )
        return bool(expected == found)


class _Marks:
    def __getattr__(self, name: str) -> Any:
        if name == "parametrize":
            return _parametrize
        return lambda *args, **named: args[0] if len(args) == 1 and callable(args[0]) else (lambda f: f)


def _parametrize(names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
    keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
    sets = [dict(zip(keys, value if len(keys) > 1 else [value], strict=True)) for value in values]

    def decorate(function: Any) -> Any:
        function.ludus_parameters = [sets, *getattr(function, "ludus_parameters", [])]
        return function

    return decorate


def _raises(expected: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
    context = _Raises(expected, match)
    if not call:
        return context
    with context:
        call[0](*call[1:], **named)
    return context


def _fail(reason: str = "") -> None:
    raise AssertionError(reason)


def pytest_stand_in() -> types.ModuleType:
    """What `import pytest` gives in a test."""
    module = types.ModuleType("pytest")
    vars(module).update(raises=_raises, approx=_Approx, fail=_fail, mark=_Marks())
    return module
