"""Whether a call's arguments fit a tool's JSON Schema: the part of it that tools use, without a package."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TYPES: dict[str, Any] = {
    "object": Mapping,
    "array": list | tuple,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
_DEEPEST = 40


def schema_problems(schema: Mapping[str, Any], value: Any) -> list[str]:
    """What of a value does not fit, each with its place; nothing where it fits."""
    return list(_problems(schema, value, "arguments", schema, 0))


def _problems(schema: Any, value: Any, where: str, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        if schema is False:
            yield f"{where}: nothing is allowed here"
        return
    if "$ref" in schema:
        yield from _problems(_referred(schema["$ref"], root), value, where, root, depth + 1)
        return
    yield from _unlike(schema, value, where)
    for name in ("anyOf", "oneOf"):
        options = _listed(schema.get(name))
        found = [list(_problems(one, value, where, root, depth + 1)) for one in options]
        if found and all(found):
            yield min(found, key=len)[0]
    for one in _listed(schema.get("allOf")):
        yield from _problems(one, value, where, root, depth + 1)
    if isinstance(value, Mapping):
        yield from _inside_object(schema, value, where, root, depth)
    elif isinstance(value, list | tuple):
        items = schema.get("items")
        for number, item in enumerate(value):
            yield from _problems(items, item, f"{where}[{number}]", root, depth + 1)


def _unlike(schema: Mapping[str, Any], value: Any, where: str) -> Iterator[str]:
    """Type, choice and limits of the value itself."""
    kinds = schema.get("type")
    wanted = [kinds] if isinstance(kinds, str) else _listed(kinds)
    if wanted and not any(_is_a(kind, value) for kind in wanted):
        yield f"{where}: {value!r:.60} is not of type {' or '.join(map(str, wanted))}"
        return
    choices = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
    if choices and value not in choices:
        yield f"{where}: {value!r:.60} is not one of {choices!r:.120}"
    size = len(value) if isinstance(value, str | list | tuple) else None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    limits: tuple[tuple[str, float | None, Callable[[float, float], bool]], ...] = (
        ("minimum", number, operator.ge),
        ("maximum", number, operator.le),
        ("exclusiveMinimum", number, operator.gt),
        ("exclusiveMaximum", number, operator.lt),
        ("minLength" if isinstance(value, str) else "minItems", size, operator.ge),
        ("maxLength" if isinstance(value, str) else "maxItems", size, operator.le),
    )
    for name, given, fits in limits:
        limit = schema.get(name)
        if given is not None and isinstance(limit, int | float) and not fits(given, limit):
            yield f"{where}: {value!r:.60} is beyond {name} = {limit}"


def _inside_object(
    schema: Mapping[str, Any], value: Mapping[str, Any], where: str, root: Mapping[str, Any], depth: int
) -> Iterator[str]:
    known = schema.get("properties")
    known = known if isinstance(known, Mapping) else {}
    for name in _listed(schema.get("required")):
        if name not in value:
            yield f"{where}: {name!r} is missing"
    others = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in known:
            yield from _problems(known[name], item, f"{where}.{name}", root, depth + 1)
        elif others is False:
            yield f"{where}: there is no {name!r}"
        else:
            yield from _problems(others, item, f"{where}.{name}", root, depth + 1)


def _listed(value: Any) -> list[Any]:
    """A server's schema may have anything where a list belongs."""
    return list(value) if isinstance(value, list | tuple) else []


def _is_a(kind: Any, value: Any) -> bool:
    if kind == "integer":
        return not isinstance(value, bool) and (
            isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        )
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    wanted = _TYPES.get(kind) if isinstance(kind, str) else None
    return wanted is None or isinstance(value, wanted)


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in str(reference).removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
