"""Comparisons of arrays that an empty array cannot pass.

To numpy and torch an empty array is close to any number: it is broadcast to nothing, of which all is true. A
solution that returns `[]` would pass `np.allclose(f(x), 3.0)`. In the tests' process these functions take an
empty operand beside one that is not for unequal.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ludus.rewards.code_tests.guest.proxies import Proxy
from ludus.rewards.code_tests.guest.test_discovery import free_names, imported

_TESTING = (
    *("assert_allclose", "assert_almost_equal", "assert_approx_equal", "assert_array_almost_equal"),
    *("assert_array_equal", "assert_array_less", "assert_equal"),
)
_COMPARISONS: dict[str, Sequence[str]] = {
    "numpy": ("allclose", "isclose", "array_equiv"),
    "numpy.testing": _TESTING,
    "torch": ("allclose", "isclose"),
}
_ALIASES = {"numpy": ("np", "numpy"), "torch": ("torch",)}


def guard_arrays(sources: Iterable[str]) -> None:
    """Make the comparisons of those modules that the tests use take empty and not empty for unequal."""
    used: set[str] = set()
    for source in sources:
        used |= imported(source) | free_names(source)
    for name, functions in _COMPARISONS.items():
        root = name.partition(".")[0]
        if not used & {root, *_ALIASES[root]}:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # the tests will say so
        for one in functions:
            setattr(module, one, _guarded(getattr(module, one), root))


def _guarded(compare: Callable[..., Any], root: str) -> Callable[..., Any]:
    @functools.wraps(compare)
    def guarded(*args: Any, **named: Any) -> Any:
        given = [_array(one, root) for one in args[:2]]
        named = {key: _array(one, root) for key, one in named.items()}
        operands = [*given, *named.values()][:2]
        if len({_is_empty(one) for one in operands}) > 1:
            if compare.__name__.startswith("assert"):
                raise AssertionError("one of the arrays is empty, and the other is not")
            library = importlib.import_module(root)
            return library.asarray(False) if compare.__name__ == "isclose" else False
        return compare(*given, *args[2:], **named)

    return guarded


def _array(value: Any, root: str) -> Any:
    """Convert to an array once: an object of the solution's may have another value when it is read again."""
    if root == "torch" or not isinstance(value, (list, tuple, Proxy)):
        return value
    try:
        return importlib.import_module("numpy").asanyarray(value)
    except ValueError:  # rows of several lengths
        return value


def _is_empty(value: Any) -> bool:
    count = getattr(value, "numel", None)
    return bool(count() == 0 if callable(count) else getattr(value, "size", 1) == 0)
