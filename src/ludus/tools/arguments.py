"""Arguments as a model writes them, turned into what the function's hints ask for.

What already fits is taken as it is. Where something does not, gentle repairs are tried, at that place
only: a list or an object that was written as a JSON string is read, a lone value becomes a list of one,
a number and its text stand for each other in a choice, and null means "left out" where there is a
default. What still does not fit is explained to the model, parameter by parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from ludus.core.failures import Fault, ToolFault
from ludus.tools.results import clean
from ludus.tools.signature import Signature, at_path, describe

Path = tuple[str | int, ...]
Problem = Mapping[str, Any]

_ROUNDS = 4
_MOST_LINES = 12
_MOST_JSON = 1_000_000
_LISTS = {"list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type"}
_OBJECTS = {"dict_type", "mapping_type", "dataclass_type", "model_type", "model_attributes_type"}
_CHOICES = {"literal_error", "enum"}
_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_MISSING = {
    "missing",
    "missing_argument",
    "missing_keyword_only_argument",
    "missing_positional_only_argument",
}
_DEEPEST = 200


def validate_arguments(signature: Signature, arguments: Any, tool: str) -> dict[str, Any]:
    """Values by parameter name; a `ToolFault` (BAD_ARGUMENTS) tells the model what was wrong."""
    raw = _as_object(arguments, tool)
    try:
        return _validated(signature, raw, tool)
    except (RecursionError, OverflowError, MemoryError, ValueError, TypeError) as error:
        if isinstance(error, ValidationError):
            raise
        raise _bad(tool, ["they are nested too deeply or too large to be read"]) from error


def _validated(signature: Signature, raw: dict[str, Any], tool: str) -> dict[str, Any]:
    problems: Sequence[Problem] = ()
    for _ in range(_ROUNDS):
        values, problems = _attempt(signature, raw)
        if values is not None:
            return values
        repaired = _repaired(raw, problems, lambda p, value: _reread(p, value, signature))
        if repaired is None:
            break
        raw = repaired
    wrapped = _repaired(raw, problems, _wrapped)
    if wrapped is not None:
        values, _ = _attempt(signature, wrapped)
        if values is not None:
            return values
    raise _bad(tool, _explained(signature, raw, problems))


def _attempt(
    signature: Signature, raw: dict[str, Any]
) -> tuple[dict[str, Any] | None, Sequence[Problem]]:
    try:
        return signature.validator.validate_python(raw), ()
    except ValidationError as error:
        return None, [dict(problem) for problem in error.errors(include_url=False)]


def _as_object(arguments: Any, tool: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        arguments = _parsed(arguments, dict)
    if not isinstance(arguments, Mapping):
        raise _bad(tool, ["the arguments must be one JSON object with a value for each parameter"])
    return {str(key): value for key, value in arguments.items()}


# Repairs


class _Remove:
    """Stands for "leave this argument out"."""


class _Keep:
    """Stands for "nothing to repair here"."""


def _repaired(
    raw: dict[str, Any], problems: Sequence[Problem], repair: Callable[[Problem, Any], Any]
) -> dict[str, Any] | None:
    """`raw` with the repairs that apply, each place once, or None when there are none."""
    done: set[Path] = set()
    for problem in problems:
        path = _path(raw, problem["loc"])
        if not path or any(path[:length] in done for length in range(len(path) + 1)):
            continue
        found = _look_up(raw, path)
        replacement = repair(problem, found)
        if replacement is not _Keep:
            raw = _replaced(raw, path, replacement)
            done.add(path)
    return raw if done else None


def _reread(problem: Problem, value: Any, signature: Signature) -> Any:
    kind = problem["type"]
    if value is None and len(problem["loc"]) == 1 and problem["loc"][0] in signature.defaults:
        return _Remove
    if isinstance(value, str) and kind in _LISTS | _OBJECTS:
        parsed = _parsed(value, list if kind in _LISTS else dict)
        return _Keep if parsed is None else parsed
    if kind in _CHOICES and isinstance(value, str):
        parsed = _parsed(value, (int, float, bool))
        return _Keep if parsed is None else parsed
    if kind in _CHOICES | {"string_type"} and isinstance(value, (int, float)):
        return json.dumps(value)
    return _Keep


def _wrapped(problem: Problem, value: Any) -> Any:
    return [value] if problem["type"] in _LISTS and value is not None else _Keep


def _parsed(text: str, kinds: Any) -> Any:
    if len(text) > _MOST_JSON:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kinds) else None


def _path(raw: Any, location: Sequence[str | int]) -> Path:
    """Where in the arguments a problem is: its location without the names of union members."""
    path: list[str | int] = []
    for step in location[:_DEEPEST]:
        in_object = isinstance(raw, dict) and step in raw
        in_list = isinstance(raw, list) and isinstance(step, int) and 0 <= step < len(raw)
        if in_object or in_list:
            raw = raw[step]
            path.append(step)
    return tuple(path)


def _look_up(raw: Any, path: Path) -> Any:
    for step in path:
        raw = raw[step]
    return raw


def _replaced(raw: Any, path: Path, value: Any) -> Any:
    """A copy of `raw` that differs at `path` only."""
    step, rest = path[0], path[1:]
    copy: Any = dict(raw) if isinstance(raw, dict) else list(raw)
    if rest:
        copy[step] = _replaced(raw[step], rest, value)
    elif value is _Remove:
        del copy[step]
    else:
        copy[step] = value
    return copy


# Explanations


def _bad(tool: str, lines: Sequence[str]) -> ToolFault:
    shown = "\n".join(f"- {line}" for line in lines[:_MOST_LINES])
    more = f"\n- and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return ToolFault(clean(f"The arguments of {tool} do not fit:\n{shown}{more}"), Fault.BAD_ARGUMENTS)


def _explained(signature: Signature, raw: dict[str, Any], problems: Sequence[Problem]) -> list[str]:
    lines: dict[str, str] = {}
    for problem in problems:
        place, line = _line(signature, raw, problem)
        lines.setdefault(place, f"{place}: {line}")
    return list(lines.values())


def _line(signature: Signature, raw: dict[str, Any], problem: Problem) -> tuple[str, str]:
    kind, location = problem["type"], problem["loc"]
    path = _path(raw, location)
    if kind in _MISSING:
        path = (*path, location[-1])
        return _place(path), f"missing; expected {_expected(signature, path)}"
    if kind in _UNKNOWN:
        parent = at_path(signature.schema, path[:-1])
        known = list(parent.get("properties", ()))
        near = get_close_matches(str(path[-1])[:100], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"
        return _place(path), f"unknown argument; {hint}"
    given = show(_look_up(raw, path))
    own_words = kind in ("value_error", "assertion_error") or ("ctx" in problem and kind not in _CHOICES)
    if own_words:
        words = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return _place(path), f"{words.replace('Input should', 'it should')[:300]}; got {given}"
    return _place(path), f"expected {_expected(signature, path)}; got {given}"


def _expected(signature: Signature, path: Path) -> str:
    return describe(at_path(signature.schema, path))[:300]


def _place(path: Path) -> str:
    text = ""
    for step in path[:20]:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text[:200] or "(all)"


def show(value: Any) -> str:
    """A value in a few words, at a cost that does not depend on its size or depth."""
    if isinstance(value, str):
        return json.dumps(value[:80], ensure_ascii=False) + ("..." if len(value) > 80 else "")
    if isinstance(value, dict):
        keys = ", ".join(str(key)[:30] for key in list(value)[:5])
        return f"an object with {len(value)} keys ({keys})" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very large number"
    return (
        json.dumps(value)
        if value is None or isinstance(value, (bool, int, float))
        else type(value).__name__
    )
