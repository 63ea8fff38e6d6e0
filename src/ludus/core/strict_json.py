"""Strict JSON for untrusted input (models, clients of servers): what is accepted can also be sent on.

Stricter than `json.loads`: a key given twice, a number that is not finite, half a surrogate pair and nesting
beyond a limit are refused. `decode` makes dataclasses of plain JSON values.
"""

from __future__ import annotations

import math
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from ludus.core.messages import Json

T = TypeVar("T")

MAX_DEPTH = 64
_MOST_PROBLEMS = 20
_MOST_CHARS = 2_000


class BadJson(ValueError):
    """A text is not acceptable JSON; the message says why."""


def read_json(
    text: str, start: int = 0, *, depth: int = MAX_DEPTH, most: int | None = None
) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends; `BadJson` says what is wrong with it."""
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except JSONDecodeError as error:
        raise BadJson(f"it is not valid JSON ({error.msg} at character {error.pos - start})") from None
    except RecursionError:
        raise _too_deep(depth) from None
    except BadJson:
        raise
    except ValueError:
        raise BadJson("it holds a number with too many digits") from None
    check_json(value, depth=depth, most=most)
    return value, stop


def whole_json(text: str, *, depth: int = MAX_DEPTH, most: int | None = None) -> Any:
    """The one JSON value that `text` is, white space aside; `BadJson` when it is anything else."""
    body = text.strip()
    value, stop = read_json(body, depth=depth, most=most)
    if stop < len(body):
        raise BadJson(f"something follows the JSON value at character {stop}")
    return value


def read_object(data: bytes | bytearray) -> Json:
    """The object that the body of a request is, in UTF-8; `BadJson` when it is anything else."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadJson(f"it is not UTF-8 (byte {error.start})") from None
    body = whole_json(text, depth=100, most=200_000)  # to use a value takes longer than to read it
    if not isinstance(body, dict):
        raise BadJson("it must be a JSON object")
    return body


def check_json(value: Any, *, depth: int = MAX_DEPTH, most: int | None = None) -> None:
    """`BadJson` for a value that could be read, but not be written again or sent on."""
    level, seen = [value], 0
    for _ in range(depth):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise BadJson(f"the number {item} is not finite")
            elif isinstance(item, str) and not item.isascii():
                try:
                    item.encode("utf-8")
                except UnicodeEncodeError:
                    raise BadJson("a string holds half of a surrogate pair") from None
        if not below:
            return
        level, seen = below, seen + len(below)
        if most is not None and seen > most:
            raise BadJson(f"it holds more than {most:,} keys and values")
    raise _too_deep(depth)


def _too_deep(depth: int) -> BadJson:
    return BadJson(f"it is nested more than {depth} levels deep")


def _object(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadJson(f'the key "{twice:.80}" is given twice')
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadJson(f"the number {text:.40} is too large")
    return number


def _constant(text: str) -> NoReturn:
    raise BadJson(f"{text} is not a JSON value")


def strict_decoder(*, control_characters: bool = False) -> JSONDecoder:
    """Refuses keys given twice and numbers that are not finite; strings may hold line ends where told."""
    return JSONDecoder(
        object_pairs_hook=_object,
        parse_float=_finite,
        parse_constant=_constant,
        strict=not control_characters,
    )


_DECODER = strict_decoder()


def decode(adapter: TypeAdapter[T], raw: Any) -> T:
    """`raw` as what the adapter makes; a `ValueError` names the fields that do not fit."""
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        raise ValueError(explained(error)) from None


def explained(error: ValidationError) -> str:
    """The problems in one line, each with the place it is at."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [
        f"{'.'.join(str(part) for part in one['loc'])[:200] or 'body'}: {one['msg']}"
        for one in problems[:_MOST_PROBLEMS]
    ]
    return "; ".join(lines)[:_MOST_CHARS]
