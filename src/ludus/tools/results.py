"""Converts a tool's return value to a result: text within limits.

A result is cut by characters before anything else looks at it, so that the cost of a huge result does not
depend on its size; only what is left is cleaned and, where a tool has a limit in tokens, tokenized. The budget
of tokens that an episode has for one observation is applied once, by the episode.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel
from pydantic_core import to_json

from ludus.core.messages import Media, ToolResult

Encode = Callable[[str], Sequence[int]]

_CHARS_PER_TOKEN = 64
_MOST_EXPANSION = 12
"""How many bytes Unicode's normal forms make of one at most (of U+FDFA 11); ASCII they leave as it is."""
_DEEPEST = 50
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """How long a result may be. Tokens count only where an `encode` function is known."""

    max_chars: int = 20_000
    max_tokens: int | None = None
    encode: Encode | None = None

    def apply(self, text: str) -> str:
        """`text`, cut in the middle where it is too long, and always encodable as UTF-8."""
        limit = self.max_chars
        if self.encode is not None and self.max_tokens is not None:
            limit = min(limit, self.max_tokens * _CHARS_PER_TOKEN)
        short = clean(cut(text, limit))
        if self.encode is None or self.max_tokens is None or _is_surely_short(short, self.max_tokens):
            return short
        return _cut_by_tokens(text, short, self.encode, self.max_tokens)


def rendered(value: Any, limits: OutputLimits) -> ToolResult:
    """A tool's return value as a result within its limits."""
    result = result_of(value)
    return replace(result, content=limits.apply(result.content))


def result_of(value: Any) -> ToolResult:
    """Whatever a tool returned as a result; its content is not bounded yet."""
    if isinstance(value, ToolResult):
        return (
            value if isinstance(value.content, str) else replace(value, content=text_of(value.content))
        )
    if isinstance(value, Media):
        return ToolResult(f"[{value.kind}]", media=(value,))
    if isinstance(value, (list, tuple)) and any(isinstance(item, Media) for item in value):
        parts = [result_of(item) for item in value]
        media = tuple(item for part in parts for item in part.media)
        return ToolResult("\n".join(part.content for part in parts), media=media)
    return ToolResult(text_of(value))


def text_of(value: Any) -> str:
    """A value as text: strings as they are, everything else as JSON, and never an exception."""
    if value is None:
        return "done"
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", errors="backslashreplace")
    try:
        return to_json(value, inf_nan_mode="strings", fallback=_foreign).decode()
    except Exception:  # noqa: BLE001 - user classes, bad text, cycles: the careful way copes with each
        return json.dumps(_plain(value, ()), ensure_ascii=False)


@runtime_checkable
class _Array(Protocol):
    """An array of numpy, torch and the like."""

    def tolist(self) -> Any: ...


def _foreign(value: Any) -> Any:
    """Something JSON has no word for: an array as a list, otherwise its own text."""
    if isinstance(value, _Array):
        return value.tolist()
    kind: Any = type(value)
    has_own_text = kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__
    return str(value) if has_own_text else f"<{kind.__name__}>"


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if id(value) in above or len(above) > _DEEPEST:
        return "..."
    inside = (*above, id(value))
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 10_000:
        return "a very large number"
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, BaseModel):
        value = dict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {clean(_safe_text(key)): _plain(item, inside) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, inside) for item in value]
    return text_of(value) if isinstance(value, (bytes, Enum)) else _safe_text(value)


def _safe_text(value: Any) -> str:
    try:
        return str(_foreign(value)) if not isinstance(value, str) else value
    except Exception:  # noqa: BLE001 - its own __str__ is broken
        return f"<{type(value).__name__}>"


def clean(text: str) -> str:
    """`text` with what UTF-8 cannot carry (lone surrogates) replaced, character by character."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def cut(text: str, max_chars: int) -> str:
    """Head and tail of `text` with a note of how much was left out, at most `max_chars` in all."""
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_note(len(text)))
    if room <= 0:
        return text[:max_chars]
    tail = room // 2
    head = room - tail
    return text[:head] + _note(len(text) - room) + (text[-tail:] if tail else "")


def _note(left_out: int) -> str:
    return f"\n... [{left_out:,} characters left out] ...\n"


def _is_surely_short(text: str, max_tokens: int) -> bool:
    """Most results have fewer bytes than they may have tokens, which is quick to see.

    A token stands for a byte at least, but of the text as a tokenizer has normalised it, which can be longer.
    """
    size = len(text) if text.isascii() else _MOST_EXPANSION * len(text.encode())
    return size <= max_tokens


def _cut_by_tokens(text: str, short: str, encode: Encode, max_tokens: int) -> str:
    """Shrink by the share that the tokens suggest until it fits, then grow back by bisection."""
    fits, too_long = len(short), len(short) + 1
    while short and (tokens := len(encode(short))) > max_tokens:
        fits, too_long = min(fits - 1, fits * max_tokens // tokens), fits
        short = clean(cut(text, fits))
    while too_long - fits > 1 + fits // 16:
        middle = (fits + too_long) // 2
        longer = clean(cut(text, middle))
        if len(encode(longer)) <= max_tokens:
            fits, short = middle, longer
        else:
            too_long = middle
    return short
