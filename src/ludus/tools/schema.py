"""JSON Schemas as models like to read them: no titles, no indirection, closed objects.

`tidy` cleans what pydantic generates; `describe` says in a few words what a schema allows; `example_of` makes a
value of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ludus.core.messages import Json

_MAPS = ("properties", "$defs", "patternProperties")
_SINGLES = ("items", "additionalProperties", "propertyNames", "contains", "not")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_FIRST = ("type", "description", "enum", "properties", "required")
_REFERENCE = "#/$defs/"
_TEXTS = ("alpha", "7", "beta, gamma = 3")
_DEEPEST = 8


def tidy(schema: Json) -> Json:
    """The same schema without titles, with references inlined unless they are recursive."""
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
    for key, value in sorted(schema.items(), key=_reading_order):
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


def _reading_order(item: tuple[str, Any]) -> int:
    return _FIRST.index(item[0]) if item[0] in _FIRST else len(_FIRST)


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
    """What a schema allows, in a few words: "integer", "list of string", "one of 'a', 'b'"."""
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        shown = ", ".join(json.dumps(option, ensure_ascii=False) for option in options)
        return shown if len(options) == 1 else f"one of {shown}"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_unique(describe(option) for option in schema[key]))
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


def _unique(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def example_of(schema: Json, variant: int, depth: int = 0) -> Any:
    """A value that a schema allows; another one for each variant, where it allows several."""
    if "const" in schema or "enum" in schema:
        options = schema.get("enum", [schema.get("const")])
        return options[variant % len(options)]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example_of(schema[key][variant % len(schema[key])], variant, depth + 1)
    kind = schema.get("type")
    if kind == "object" and depth < _DEEPEST:
        wanted = schema.get("required", ()) if variant % 2 else schema.get("properties", {})
        inner = schema.get("properties", {})
        return {name: example_of(inner[name], variant, depth + 1) for name in wanted if name in inner}
    if kind == "array" and depth < _DEEPEST:
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
