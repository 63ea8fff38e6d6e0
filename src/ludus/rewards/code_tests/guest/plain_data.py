"""Plain data as JSON: all that is exchanged between the tests' process and the solution's.

JSON says None, booleans, small integers, finite floats, strings and lists as they are. Everything else is
an object with one key: "i" a large integer, "f" a float that is not finite, "c" complex, "b" bytes, "a" a
bytearray, "t" tuple, "s" set, "z" frozenset, "d" dict, "r" range, "q" a fraction, "m" a decimal, "e" an
exception class (its name, and the nearest built-in one), "h" a handle: something that stays where it is,
and can be used from the other side by its number, "w" the handle of a coroutine.

A value is always rebuilt as the plain built-in type: a subclass with methods of its own arrives without
them. `ValueError` means that a text is no such data.
"""

from __future__ import annotations

import base64
import builtins
import json
import math
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

DEEPEST = 60
MOST_PARTS = 1_000_000
_SMALL = 1 << 62
_FEW_KEYS = 200

ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}
"""The built-in exceptions that can cross; those that would end a program are not among them."""

Refer = Callable[[Any], Any]


class TooLarge(ValueError):
    """The value is nested too deeply, or has too many parts."""


class Encoder:
    """Values as JSON-able data. `refer` gives the encoding of what is not plain, or raises TypeError."""

    def __init__(self, refer: Refer) -> None:
        self._refer = refer
        self._parts = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        self._parts += 1
        if depth > DEEPEST or self._parts > MOST_PARTS:
            raise TooLarge("the value is nested too deeply, or has too many parts")
        if value is None or value is True or value is False:
            return value
        scalar = _scalar(value)
        if scalar is not None:
            return scalar
        return self._container(value, depth + 1)

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, list):
            return [self.encode(item, depth) for item in list.__iter__(value)]
        if isinstance(value, tuple):
            return {"t": [self.encode(item, depth) for item in tuple.__iter__(value)]}
        if isinstance(value, dict):
            pairs = [[self.encode(k, depth), self.encode(v, depth)] for k, v in dict.items(value)]
            return {"d": pairs}
        if isinstance(value, set):
            return {"s": [self.encode(item, depth) for item in set.__iter__(value)]}
        if isinstance(value, frozenset):
            return {"z": [self.encode(item, depth) for item in frozenset.__iter__(value)]}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist(), depth)
        return self._refer(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, int):
        number = int.__index__(value)
        return int(number) if -_SMALL < number < _SMALL else {"i": hex(number)}
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else {"f": repr(real)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return {"c": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes):
        return {"b": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, bytearray):
        return {"a": base64.b64encode(bytes(value)).decode()}
    if type(value) is range:
        return {"r": [hex(value.start), hex(value.stop), hex(value.step)]}
    if type(value) is Fraction:
        return {"q": [hex(value.numerator), hex(value.denominator)]}
    if type(value) is Decimal:
        return {"m": str(value)}
    return None


class Decoder:
    """Values from JSON-able data. `resolve` makes what a handle or an exception class stands for."""

    def __init__(self, resolve: Callable[[str, Any], Any]) -> None:
        self._resolve = resolve
        self._parts = 0

    def decode(self, data: Any, depth: int = 0) -> Any:
        self._parts += 1
        if depth > DEEPEST or self._parts > MOST_PARTS:
            raise TooLarge("the value is nested too deeply, or has too many parts")
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if isinstance(data, list):
            return [self.decode(item, depth + 1) for item in data]
        if not isinstance(data, dict) or len(data) != 1:
            raise ValueError("this is not plain data")
        [(tag, inner)] = data.items()
        try:
            return self._tagged(tag, inner, depth + 1)
        except (TypeError, LookupError, InvalidOperation, ZeroDivisionError, OverflowError) as error:
            raise ValueError(f"this is not plain data: {error}") from error

    def _tagged(self, tag: str, inner: Any, depth: int) -> Any:
        if tag in _SEQUENCES:
            if not isinstance(inner, list):
                raise ValueError("this is not plain data")
            items = [self.decode(item, depth) for item in inner]
            return _SEQUENCES[tag](items if tag == "t" else _hashed(items))
        if tag == "d":
            pairs = [(self.decode(key, depth), self.decode(item, depth)) for key, item in inner]
            _hashed([key for key, _ in pairs])
            return dict(pairs)
        if tag in _SCALARS:
            return _SCALARS[tag](inner)
        return self._resolve(tag, inner)


def _hashed(keys: list[Any]) -> list[Any]:
    """`keys`, if they can be put into a table. Many with one hash would take quadratic time on purpose."""
    if len(keys) > _FEW_KEYS and len({hash(key) for key in keys}) < len(keys) // 2:
        raise TooLarge("the keys were chosen to collide")
    return keys


_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"t": tuple, "s": set, "z": frozenset}
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "i": lambda text: int(text, 16),
    "f": lambda text: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[text],
    "c": lambda pair: complex(float(pair[0]), float(pair[1])),
    "b": lambda text: base64.b64decode(text, validate=True),
    "a": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "r": lambda ends: range(int(ends[0], 16), int(ends[1], 16), int(ends[2], 16)),
    "q": lambda pair: Fraction(int(pair[0], 16), int(pair[1], 16)),
    "m": lambda text: _decimal(str(text)),
}


def _decimal(text: str) -> Decimal:
    """A decimal. Not a signalling NaN: comparing one raises, wherever that happens."""
    found = Decimal(text)
    if found.is_snan():
        raise ValueError("this is not plain data")
    return found


def refuse(value: Any) -> Any:
    """For an `Encoder` that takes plain data only."""
    raise TypeError(f"{type(value).__name__} is not plain data")


def no_handles(tag: str, inner: Any) -> Any:
    """For a `Decoder` that takes plain data only."""
    raise ValueError("this is not plain data")


def read(text: str) -> Any:
    """JSON as data; `ValueError` for anything else, numbers of thousands of digits included."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise TooLarge("the text is nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not plain data")


def write(data: Any) -> str:
    """Data as JSON on one line, in ASCII. `ValueError` for what is no data; it may be nested too deeply."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise TooLarge("the data is nested too deeply") from None
