"""Text and values in a form that every reader of Parquet and JSON accepts, and that can be undone.

Text from a model or a tool may hold lone surrogates, which are not UTF-8, and NUL, at which some readers
stop. Both are written as ␛ and four hexadecimal digits (so is ␛ itself); all other text stays as it is.

A value is JSON where it can be. What JSON has no word for is an object with one reserved key: `$float`
(not a number, infinities), `$tuple`, `$items` (a mapping whose keys are not text), `$bytes` (base64),
`$dict` (a mapping that happens to look like one of these), and `$repr` for what can be shown and not
restored.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_UNSAFE = re.compile("[\x00\ud800-\udfff␛]")
_ESCAPE = re.compile("␛([0-9a-f]{4})")
_RESERVED = ("$float", "$tuple", "$items", "$bytes", "$dict", "$repr")
_MAX_DEPTH = 100
_MAX_REPR = 10_000
_MAX_BITS = 10_000  # Python refuses to write longer integers in decimal


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands for a value that could not be stored: only how it looked was kept."""

    text: str


def escape(text: str) -> str:
    """The text without lone surrogates and NUL."""
    return _UNSAFE.sub(lambda match: f"␛{ord(match[0]):04x}", text)


def unescape(text: str) -> str:
    """The text that `escape` was given."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)


def dump_value(value: Any) -> tuple[str, bool]:
    """The value as valid, escaped JSON text, and whether `load_value` can restore it exactly."""
    lost: list[str] = []
    text = json.dumps(_encoded(value, (), lost), ensure_ascii=False, allow_nan=False)
    return escape(text), not lost


def load_value(text: str) -> Any:
    """The value that `dump_value` was given; `Opaque` in place of what could not be stored."""
    return _decoded(json.loads(unescape(text)))


def _encoded(value: Any, above: tuple[int, ...], lost: list[str]) -> Any:
    """`above` are the ids of the containers around the value; what cannot be restored is added to `lost`."""
    if isinstance(value, np.generic):
        value = value.item()
    inside = (*above, id(value))
    match value:
        case None | bool() | str():
            return value
        case int() if value.bit_length() <= _MAX_BITS:
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case list() | tuple() | Mapping() if id(value) in above or len(above) >= _MAX_DEPTH:
            text = f"<a {type(value).__name__} nested too deeply>"
        case list() | tuple():
            items = [_encoded(item, inside, lost) for item in value]
            return {"$tuple": items} if isinstance(value, tuple) else items
        case Mapping() if all(isinstance(key, str) for key in value):
            plain = {str(key): _encoded(item, inside, lost) for key, item in value.items()}
            return {"$dict": plain} if len(plain) == 1 and next(iter(plain)) in _RESERVED else plain
        case Mapping():
            pairs = value.items()
            return {"$items": [[_encoded(part, inside, lost) for part in pair] for pair in pairs]}
        case Opaque():
            text = value.text
        case _:
            text = _shown(value)
    lost.append(text)
    return {"$repr": text}


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_MAX_REPR]
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"<a {type(value).__name__} whose repr raised {type(error).__name__}>"


def _decoded(raw: Any) -> Any:
    if isinstance(raw, list):
        return [_decoded(item) for item in raw]
    match raw:
        case {"$float": content} if len(raw) == 1:
            return float(content)
        case {"$tuple": content} if len(raw) == 1:
            return tuple(_decoded(item) for item in content)
        case {"$items": content} if len(raw) == 1:
            return {_decoded(key): _decoded(item) for key, item in content}
        case {"$bytes": content} if len(raw) == 1:
            return base64.b64decode(content)
        case {"$dict": content} if len(raw) == 1:
            return {key: _decoded(item) for key, item in content.items()}
        case {"$repr": content} if len(raw) == 1:
            return Opaque(content)
        case dict():
            return {key: _decoded(item) for key, item in raw.items()}
    return raw
