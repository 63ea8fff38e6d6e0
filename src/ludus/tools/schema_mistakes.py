"""Mistakes in the JSON Schema of a tool that a model would be misled by: `ludus check tool` tells of them.

They are no errors: a schema with them still says something, and the server is the judge of its arguments. Such
schemas come from strangers, so the work is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TYPES = frozenset({"object", "array", "string", "boolean", "null", "number", "integer"})
_MOST_STEPS = 5_000
_MOST_TOLD = 8
_TABLES = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")


def schema_mistakes(schema: Mapping[str, Any]) -> list[str]:
    """Types that do not exist, and references that name nothing, place by place; the first few."""
    found: list[str] = []
    open_ends: list[tuple[str, Any]] = [("", schema)]
    for _ in range(_MOST_STEPS):
        if not open_ends or len(found) >= _MOST_TOLD:
            break
        place, one = open_ends.pop(0)
        if isinstance(one, Mapping):
            found += _own_mistakes(one, place, schema)
            open_ends += _inner(one, place)
    return found[:_MOST_TOLD]


def _own_mistakes(one: Mapping[str, Any], place: str, root: Mapping[str, Any]) -> Iterator[str]:
    named = f"{place}: " if place else ""
    kinds = one.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind is not None and (not isinstance(kind, str) or kind not in _TYPES):
            yield f"{named}there is no type {kind!r:.80}; there are: {', '.join(sorted(_TYPES))}"
    reference = one.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and not _is_there(reference, root):
        yield f"{named}{reference!r:.120} names nothing in the schema"


def _is_there(reference: str, root: Any) -> bool:
    """Whether a reference leads somewhere; one by an anchor, which is rare, is taken to."""
    if reference[1:2] not in ("", "/"):
        return True
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        elif isinstance(root, Mapping) and name in root:
            root = root[name]
        else:
            return False
    return True


def _inner(one: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    start = f"{place}." if place else ""
    for key in _TABLES:
        if isinstance(table := one.get(key), Mapping):
            yield from ((f"{start}{key}.{str(name)[:80]}", inner) for name, inner in table.items())
    for key in _LISTS:
        if isinstance(options := one.get(key), list):
            yield from ((f"{start}{key}[{number}]", inner) for number, inner in enumerate(options))
    yield from ((f"{start}{key}", one[key]) for key in _SINGLE if key in one)
