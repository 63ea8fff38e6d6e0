"""JSON Schemas of tools: tidied for a model, put into words, checked, used to check arguments and to make
examples.

The check of arguments is safe with schemas from strangers. It knows the keywords that tools use and ignores the
rest, of which the server is the judge: `pattern` and `format` above all, since matching a hostile regular
expression may never end. References are followed inside the schema only. The work is bounded: where a schema
makes it explode, the check ends, and again the server decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from ludus.core.messages import Json

_MOST_STEPS = 5_000
_DEEPEST = 40
_MOST_PROBLEMS = 8
_TEXTS = ("alpha", "7", "beta, gamma = 3")
_DEEPEST_EXAMPLE = 8
_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "propertyNames", "contains", "not")
_ORDER = {"type": 0, "description": 1, "enum": 2, "properties": 3, "required": 4}
"""What a model reads first; anything else follows."""
_REFERENCE = "#/$defs/"
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


class _Enough(Exception):
    """The work is over its bound."""


def argument_problems(schema: Mapping[str, Any], arguments: Any) -> list[str]:
    """The problems of the arguments, place by place; empty if there are none, or if the check cannot decide."""
    try:
        return list(_Check(schema).problems(schema, arguments, "", 0))[:_MOST_PROBLEMS]
    except (_Enough, RecursionError):
        return []


class _Check:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps = 0

    def problems(self, schema: Any, value: Any, place: str, depth: int) -> Iterator[str]:
        self._steps += 1
        if self._steps > _MOST_STEPS or depth > _DEEPEST:
            raise _Enough
        if schema is False:
            yield f"{place or '(all)'}: not allowed"
            return
        if not isinstance(schema, Mapping):
            return
        if isinstance(schema.get("$ref"), str):
            yield from self.problems(referenced(self._root, schema["$ref"]), value, place, depth + 1)
        for option in _list(schema.get("allOf")):
            yield from self.problems(option, value, place, depth + 1)
        for key in ("anyOf", "oneOf"):
            options = _list(schema.get(key))
            found = [list(self.problems(option, value, place, depth + 1)) for option in options]
            if found and all(found):
                yield min(found, key=len)[0]
        own = _own_problem(schema, value)
        if own:
            yield f"{place or '(all)'}: {own}; got {show(value)}"
        elif isinstance(value, dict):
            yield from self._members(schema, value, place, depth)
        elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
            for index, item in enumerate(value):
                yield from self.problems(schema["items"], item, f"{place}[{index}]", depth + 1)

    def _members(
        self, schema: Mapping[str, Any], value: dict[str, Any], place: str, depth: int
    ) -> Iterator[str]:
        properties = schema.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        for name in _list(schema.get("required")):
            if isinstance(name, str) and name not in value:
                yield f"{_inside(place, name)}: missing"
        for name, item in value.items():
            if name in known:
                yield from self.problems(known[name], item, _inside(place, name), depth + 1)
            elif schema.get("additionalProperties") is False and "patternProperties" not in schema:
                near = get_close_matches(name[:100], [str(one) for one in known], n=1)
                hint = (
                    f"did you mean {near[0]}?"
                    if near
                    else f"known: {', '.join(list(known)[:20]) or 'none'}"
                )
                yield f"{_inside(place, name)}: unknown argument; {hint}"
            elif "patternProperties" not in schema:  # those may have another schema for it
                others = schema.get("additionalProperties")
                yield from self.problems(others, item, _inside(place, name), depth + 1)


def referenced(root: Mapping[str, Any], reference: str) -> Any:
    """The schema that a reference names; {}, which allows everything, where there is none."""
    found = _followed(root, reference) if reference.startswith("#") else None
    return {} if found is None else found


def _followed(found: Any, reference: str) -> Any:
    """What a reference within a schema leads to, if anything; one by an anchor, which is rare, to {}."""
    if reference[1:2] not in ("", "/"):
        return {}
    for step in reference[1:].split("/")[1:21]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return None
    return found


def _own_problem(schema: Mapping[str, Any], value: Any) -> str:
    """The problem of a value, without its members."""
    if "const" in schema and not _equal(value, schema["const"]):
        return f"expected {json.dumps(schema['const'])[:100]}"
    options = schema.get("enum")
    if isinstance(options, list) and options and not any(_equal(value, one) for one in options):
        return f"expected one of {', '.join(json.dumps(one) for one in options)[:300]}"
    kinds = schema.get("type")
    wanted = [kinds] if isinstance(kinds, str) else [one for one in _list(kinds) if isinstance(one, str)]
    if wanted and all(one in _TYPES for one in wanted) and not any(_is(value, one) for one in wanted):
        return f"expected {' or '.join(wanted)}"
    if _is(value, "number"):
        return _bounds(schema, value, "minimum", "maximum", "a number") or _open_bounds(schema, value)
    if isinstance(value, str):
        return _bounds(schema, len(value), "minLength", "maxLength", "a length")
    if isinstance(value, list):
        return _bounds(schema, len(value), "minItems", "maxItems", "a length")
    return ""


def _bounds(schema: Mapping[str, Any], number: float, low: str, high: str, what: str) -> str:
    least, most = schema.get(low), schema.get(high)
    if least is not None and _is(least, "number") and number < least:
        return f"expected {what} of at least {least}"
    if most is not None and _is(most, "number") and number > most:
        return f"expected {what} of at most {most}"
    return ""


def _open_bounds(schema: Mapping[str, Any], number: float) -> str:
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is not None and _is(above, "number") and number <= above:
        return f"expected a number above {above}"
    if below is not None and _is(below, "number") and number >= below:
        return f"expected a number below {below}"
    return ""


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _equal(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _inside(place: str, name: str) -> str:
    return f"{place}.{name[:80]}" if place else name[:80]


# Mistakes in a schema itself


def schema_mistakes(schema: Mapping[str, Any]) -> list[str]:
    """Types that do not exist, and references that name nothing, place by place; the first few."""
    found: list[str] = []
    open_ends: list[tuple[str, Any]] = [("", schema)]
    for _ in range(_MOST_STEPS):
        if not open_ends or len(found) >= _MOST_PROBLEMS:
            break
        place, one = open_ends.pop(0)
        if isinstance(one, Mapping):
            found += _own_mistakes(one, place, schema)
            open_ends += _inner(one, place)
    return found[:_MOST_PROBLEMS]


def _own_mistakes(one: Mapping[str, Any], place: str, root: Mapping[str, Any]) -> Iterator[str]:
    named = f"{place}: " if place else ""
    kinds = one.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind is not None and (not isinstance(kind, str) or kind not in _TYPES):
            yield f"{named}there is no type {kind!r:.80}; there are: {', '.join(sorted(_TYPES))}"
    reference = one.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and _followed(root, reference) is None:
        yield f"{named}{reference!r:.120} names nothing in the schema"


def _inner(one: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    start = f"{place}." if place else ""
    for key in _MAPS:
        if isinstance(table := one.get(key), Mapping):
            yield from ((f"{start}{key}.{str(name)[:80]}", inner) for name, inner in table.items())
    for key in _LISTS:
        if isinstance(options := one.get(key), list):
            yield from ((f"{start}{key}[{number}]", inner) for number, inner in enumerate(options))
    yield from ((f"{start}{key}", one[key]) for key in _SINGLES if key in one)


# Values that a schema allows


def example_of(schema: Json, variant: int, depth: int = 0) -> Any:
    """A value that a schema allows; another one for each variant, where it allows several."""
    if "const" in schema or "enum" in schema:
        options = schema.get("enum", [schema.get("const")])
        return options[variant % len(options)]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example_of(schema[key][variant % len(schema[key])], variant, depth + 1)
    kind = schema.get("type")
    if kind == "object" and depth < _DEEPEST_EXAMPLE:
        wanted = schema.get("required", ()) if variant % 2 else schema.get("properties", {})
        inner = schema.get("properties", {})
        return {name: example_of(inner[name], variant, depth + 1) for name in wanted if name in inner}
    if kind == "array" and depth < _DEEPEST_EXAMPLE:
        items = schema.get("prefixItems") or [schema.get("items", {})] * max(
            schema.get("minItems", 0), variant + 1
        )
        return [example_of(item, variant, depth + 1) for item in items[: schema.get("maxItems")]]
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + len(_TEXTS) + 1) - 1)
        return min(low + variant, max(low, high))
    if kind == "boolean":
        return variant % 2 == 0
    if kind == "null" or (kind not in ("string", None)):
        return None
    text = _TEXTS[variant % len(_TEXTS)]
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]


# JSON Schemas as models like to read them: no titles, no indirection, closed objects


def tidy(schema: Json) -> Json:
    """A schema without titles, with references inlined unless they are recursive."""
    definitions: dict[str, Json] = schema.get("$defs", {})
    recursive = {name for name in definitions if name in _reachable(name, definitions)}
    inline = {name: body for name, body in definitions.items() if name not in recursive}
    body = {key: value for key, value in schema.items() if key != "$defs"}
    result = _tidied(body, inline)
    if recursive:
        result["$defs"] = {name: _tidied(definitions[name], inline) for name in sorted(recursive)}
    return result


def children(schema: Json) -> Iterator[Json]:
    """The schemas directly inside `schema`."""
    for key in _MAPS:
        yield from (value for value in schema.get(key, {}).values() if isinstance(value, dict))
    for key in _SINGLES:
        if isinstance(schema.get(key), dict):
            yield schema[key]
    for key in _LISTS:
        yield from (value for value in schema.get(key, ()) if isinstance(value, dict))


def is_loose(schema: Json) -> bool:
    """Whether a schema leaves open what some value is: any value, or a list or an object of any."""
    if not schema.keys() & {"type", "enum", "const", "$ref", *_LISTS}:
        return True
    kind = schema.get("type")
    if kind == "array" and not schema.keys() & {"items", "prefixItems"}:
        return True
    extra = schema.get("additionalProperties", not schema.get("properties"))
    if kind == "object" and extra is True:
        return True
    return any(map(is_loose, children(schema)))


def _reachable(name: str, definitions: Mapping[str, Json]) -> set[str]:
    found: set[str] = set()
    pending = [definitions[name]]
    while pending:
        schema = pending.pop()
        target = str(schema.get("$ref", "")).removeprefix(_REFERENCE)
        if target in definitions and target not in found:
            found.add(target)
            pending.append(definitions[target])
        pending.extend(children(schema))
    return found


def _tidied(schema: Json, inline: Mapping[str, Json]) -> Json:
    target = str(schema.get("$ref", "")).removeprefix(_REFERENCE)
    if target in inline:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**inline[target], **rest}
        return _tidied(schema, inline)
    result: Json = {}
    for key, value in sorted(schema.items(), key=lambda item: _ORDER.get(item[0], len(_ORDER))):
        if key in ("title", "discriminator"):
            continue
        if key in _MAPS:
            result[key] = {name: _tidied(inner, inline) for name, inner in value.items()}
        elif key in _SINGLES and isinstance(value, dict):
            result[key] = _tidied(value, inline)
        elif key in _LISTS:
            result[key] = [_tidied(inner, inline) for inner in value]
        else:
            result[key] = value
    if "properties" in result:
        result.setdefault("additionalProperties", False)
    return result


def at_path(schema: Json, path: Sequence[str | int]) -> Json:
    """The part of a tidied schema that speaks of the value at `path`; {} where it says nothing."""
    definitions = schema.get("$defs", {})
    for step in path:
        found = (_step(option, step) for option in _options(schema, definitions))
        schema = next((inner for inner in found if inner is not None), {})
    return schema


def _options(schema: Json, definitions: Mapping[str, Json]) -> Iterator[Json]:
    target = str(schema.get("$ref", "")).removeprefix(_REFERENCE)
    schema = definitions.get(target, schema)
    yield schema
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key, ()):
            yield from _options(option, definitions)


def _step(schema: Json, step: str | int) -> Json | None:
    inner: Any = None
    if isinstance(step, int):
        prefix = schema.get("prefixItems", ())
        inner = prefix[step] if 0 <= step < len(prefix) else schema.get("items")
    else:
        inner = schema.get("properties", {}).get(step, schema.get("additionalProperties"))
    return inner if isinstance(inner, dict) else None


def describe(schema: Json) -> str:
    """A schema in a few words: "integer", "list of string", "one of 'a', 'b'"."""
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        shown = ", ".join(json.dumps(option, ensure_ascii=False) for option in options)
        return shown if len(options) == 1 else f"one of {shown}"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(describe(option) for option in schema[key]))
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:
            return f"list of [{', '.join(describe(item) for item in schema['prefixItems'])}]"
        return f"list of {describe(schema['items'])}" if schema.get("items") else "list"
    if kind == "object" and schema.get("properties"):
        return f"object with {', '.join(schema['properties'])}"
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind is None:
        return "object" if "$ref" in schema else "any value"
    return str(kind)


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
