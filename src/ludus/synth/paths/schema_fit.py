"""Does whatever one JSON Schema allows fit another one? What a tool returns, for what another one takes.

`inlined` puts definitions in the place of references to them, which servers write for every model of theirs.
`fits` is careful rather than complete: where it says yes, every value of the first is one of the second (a
property test compares it with a validator); where it cannot tell, it says no.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludus.core.messages import Json
from ludus.tools.json_schema import referenced

_UNIONS = ("anyOf", "oneOf")
_KNOWN = {
    "type", "enum", "const", "anyOf", "oneOf", "items", "properties", "required", "additionalProperties",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems",
    "maxItems", "description", "title", "default", "examples", "format", "pattern",
}  # fmt: skip
"""Keywords that are understood; a wanted schema with any other is not matched."""
_LOW = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_HIGH = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
_EXACT = ("format", "pattern")
_DEEPEST = 6
_MOST_STEPS = 5_000


def inlined(schema: Json) -> Json:
    """A schema without references; one that leads back to itself, or one too many, allows anything."""
    steps = 0

    def plain(one: Any, above: frozenset[str]) -> Any:
        nonlocal steps
        steps += 1
        if steps > _MOST_STEPS:
            return {}
        if isinstance(one, list):
            return [plain(inner, above) for inner in one]
        if not isinstance(one, Mapping):
            return one
        rest = {name: plain(inner, above) for name, inner in one.items() if name != "$defs"}
        alone = rest.pop("allOf", None)
        if isinstance(alone, list) and len(alone) == 1 and isinstance(alone[0], Mapping):
            rest = {**alone[0], **rest}  # how a reference is written that has a default beside it
        elif alone is not None:
            rest["allOf"] = alone
        target = rest.get("$ref")
        if not isinstance(target, str):
            return rest
        del rest["$ref"]
        found = {} if target in above else plain(referenced(schema, target), above | {target})
        return {**found, **rest} if isinstance(found, Mapping) else rest

    made: Json = plain(schema, frozenset())
    return made


def fits(returned: Json, wanted: Json, depth: int = 0) -> bool:
    """Whether every value that `returned` allows is one that `wanted` allows."""
    if depth > _DEEPEST or wanted.keys() - _KNOWN:
        return False
    for key in _UNIONS:
        if key in returned:
            return all(fits(_joined(returned, key, one), wanted, depth + 1) for one in returned[key])
    if "anyOf" in wanted:
        return any(fits(returned, _joined(wanted, "anyOf", one), depth + 1) for one in wanted["anyOf"])
    if "oneOf" in wanted:
        return False  # exactly one of them: overlaps cannot be found here
    kinds = types_of(returned)
    if len(kinds) != 1:
        return len(kinds) > 1 and all(
            fits({**returned, "type": kind}, wanted, depth + 1) for kind in kinds
        )
    if not _type_fits(kinds[0], wanted):
        return False
    if not _choices_fit(returned, wanted):
        return False
    if "enum" in returned or "const" in returned:
        is_bare = not wanted.keys() & {*_LOW, *_HIGH, *_EXACT, "items", "properties", "required"}
        return is_bare or "enum" in wanted or "const" in wanted
    return _limits_fit(returned, wanted) and _inside_fits(kinds[0], returned, wanted, depth)


def types_of(schema: Json) -> Sequence[str]:
    """The types that a schema names; those of its choices where it names none."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [str(one) for one in kind]
    choices = choices_of(schema)
    return sorted({_type_of(one) for one in choices}) if choices is not None else []


def choices_of(schema: Json) -> list[Any] | None:
    """The values of an enum or a const; None where there are others."""
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) else None


def type_name(schema: Json) -> str:
    """The type of a schema in a word: "enum" for a choice, else the type, such as "integer"."""
    if choices_of(schema) is not None:
        return "enum"
    kinds = types_of(schema)
    for key in _UNIONS:
        kinds = [*kinds, *(type_name(one) for one in schema.get(key, ()) if isinstance(one, dict))]
    named = sorted(set(kinds) - {"null"})
    return named[0] if len(named) == 1 else "any"


def _joined(schema: Json, key: str, alternative: Any) -> Json:
    """One alternative of a union, with what stands beside the union."""
    rest = {name: value for name, value in schema.items() if name != key}
    return {**rest, **alternative} if isinstance(alternative, Mapping) else rest


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")


def _type_fits(kind: str, wanted: Json) -> bool:
    allowed = types_of(wanted)
    if not allowed:
        return not (wanted.keys() & {"properties", "items"})
    return kind in allowed or (kind == "integer" and "number" in allowed)


def _choices_fit(returned: Json, wanted: Json) -> bool:
    allowed = choices_of(wanted)
    if allowed is None:
        return True
    given = choices_of(returned)
    # 1 and True are equal in Python and different in JSON
    keys = {(_type_of(one), repr(one)) for one in allowed}
    return given is not None and all((_type_of(one), repr(one)) in keys for one in given)


def _limits_fit(returned: Json, wanted: Json) -> bool:
    for key in _EXACT:
        if key in wanted and returned.get(key) != wanted[key]:
            return False
    low = all(_number(returned.get(key)) >= _number(wanted[key]) for key in _LOW if key in wanted)
    high = all(
        -_number(returned.get(key), -1) >= -_number(wanted[key]) for key in _HIGH if key in wanted
    )
    return low and high


def _number(value: Any, sign: int = 1) -> float:
    """A limit as a number; what is missing is no limit: below (sign 1) or above (-1) everything."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else float("-inf") * sign


def _inside_fits(kind: str, returned: Json, wanted: Json, depth: int) -> bool:
    if kind == "array":
        return "items" not in wanted or fits(returned.get("items", {}), wanted["items"], depth + 1)
    if kind != "object":
        return True
    own, taken = returned.get("properties", {}), wanted.get("properties", {})
    if set(wanted.get("required", ())) - set(returned.get("required", ())):
        return False
    # what the first does not forbid may hold anything, also under a name that the second knows
    is_closed = returned.get("additionalProperties") is False
    extra = wanted.get("additionalProperties", True)
    if (taken or extra is not True) and not is_closed:
        return False
    if extra is not True and own.keys() - taken.keys():
        return False
    return all(fits(own[name], taken[name], depth + 1) for name in own.keys() & taken.keys())
