"""Reading calls that are written as JSON, from text that may be anything."""

from __future__ import annotations

import json
import math
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn

from ludus.core.messages import Json, ToolCall
from ludus.rollouts.formats.base import malformed

MAX_DEPTH = 64
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})


class BadJson(ValueError):
    """What is wrong with a text that should be JSON."""


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends; `BadJson` says what is wrong with it.

    Stricter than `json.loads`: a key given twice, a number that is not finite, nesting beyond
    `MAX_DEPTH` and half a surrogate pair are refused, so that every value can be stored and sent on.
    """
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except JSONDecodeError as error:
        raise BadJson(f"it is not valid JSON ({error.msg} at character {error.pos - start})") from None
    except RecursionError:
        raise BadJson(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except BadJson:
        raise
    except ValueError:
        raise BadJson("it holds a number with too many digits") from None
    _check(value)
    return value, stop


def whole_json(text: str) -> Any:
    """The one JSON value that `text` is, white space aside; `BadJson` when it is anything else."""
    body = text.strip()
    value, stop = read_json(body)
    if stop < len(body):
        raise BadJson(f"something follows the JSON value at character {stop}")
    return value


def read_call(value: Any, example: str) -> ToolCall:
    """The call that an object such as `example` means. `parameters` will do for `arguments`."""
    if not isinstance(value, dict):
        return malformed(f"a call is a JSON object; write {example}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return malformed(f'the key "name" must hold the name of a tool; write {example}')
    unknown = sorted(set(value) - _KEYS)
    if unknown:
        return malformed(
            f'unknown key "{unknown[0]:.80}" beside "name"; what the tool takes goes into '
            f'"arguments": write {example}',
            name,
        )
    if "arguments" in value and "parameters" in value:
        return malformed(f'give "arguments" or "parameters", not both; write {example}', name)
    try:
        arguments = _arguments(value.get("arguments", value.get("parameters")))
    except BadJson as problem:
        return malformed(f"the arguments cannot be read: {problem}; write {example}", name)
    return ToolCall(name.strip(), arguments)


def write_json(value: Any) -> str:
    """JSON the way chat templates write it: spaces after separators, letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _arguments(raw: Any) -> Json:
    """An object; nothing at all means none, and a string may hold the object as JSON."""
    if raw is None:
        return {}
    if isinstance(raw, str):
        raw = whole_json(raw) if raw.strip() else {}
    if not isinstance(raw, dict):
        raise BadJson(f"they must be an object, not {_kind(raw)}")
    return raw


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


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


def _check(value: Any) -> None:
    """Refuse what could be read, but not be written again or sent on."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, str) and not item.isascii():
                try:
                    item.encode("utf-8")
                except UnicodeEncodeError:
                    raise BadJson("a string holds half of a surrogate pair") from None
        if not below:
            return
        level = below
    raise BadJson(f"it is nested more than {MAX_DEPTH} levels deep")


_DECODER = JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_constant)
