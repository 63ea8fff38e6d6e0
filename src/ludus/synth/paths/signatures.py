"""Magnet's graph of function signatures: what tools return, what they take, and which fits where.

An edge is data flow: the `flight_id` that a search returns feeds the `flight_id` that a booking takes. Name and
type must fit. Names are compared as words; words that say little (`id`, `name`) fit only where the two tools
are about the same thing. Yin et al., "Magnet: Multi-turn Tool-use Data Synthesis and Distillation via Graph
Translation", 2025, arXiv:2503.07826.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolSpec
from ludus.tools.json_schema import referenced

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_GENERIC = frozenset(
    {"id", "name", "value", "type", "text", "status", "count", "title", "result", "data", "key", "code",
     "number", "date", "time", "url", "path"}
)  # fmt: skip
"""Words that say little of what is called so."""
_WRAPPERS = frozenset({"result", "results", "data", "items", "content", "response"})
"""Names of what holds a result, which say nothing of it."""
_DEEPEST = 4

Place = tuple[str | int, ...]
"""Where in a result a value stands: names of fields, and 0 for the first of a list."""


@dataclass(frozen=True, slots=True)
class ParameterNode:
    """Something that a tool takes."""

    tool: str
    name: str
    schema: Json = field(compare=False, repr=False)
    is_required: bool = field(compare=False, default=True)


@dataclass(frozen=True, slots=True)
class ReturnNode:
    """Something that a tool returns: the whole result, or a field of it."""

    tool: str
    place: Place
    schema: Json = field(compare=False, repr=False)
    is_certain: bool = field(compare=False, default=True)
    """Whether every result has it; a field that may be missing, or the first of a list that may be empty."""


@dataclass(frozen=True, slots=True)
class SignatureGraph:
    """The tools, and for each parameter the return values that fit it."""

    specs: dict[str, ToolSpec]
    parameters: dict[str, tuple[ParameterNode, ...]]
    returns: dict[str, tuple[ReturnNode, ...]]
    feeders: dict[ParameterNode, tuple[ReturnNode, ...]]

    @classmethod
    def of(cls, specs: Sequence[ToolSpec]) -> SignatureGraph:
        if not specs:
            raise ConfigError("there are no tools to make calls of: name some")
        parameters = {spec.name: tuple(_parameters(spec)) for spec in specs}
        returns = {
            spec.name: tuple(_inside(spec.name, (), inlined(spec.returns or {}), True, 0))
            for spec in specs
        }
        every = [node for nodes in returns.values() for node in nodes]
        feeders = {
            taken: tuple(node for node in every if node.tool != taken.tool and feeds(node, taken))
            for nodes in parameters.values()
            for taken in nodes
        }
        return cls({spec.name: spec for spec in specs}, parameters, returns, feeders)

    @property
    def edges(self) -> list[tuple[ReturnNode, ParameterNode]]:
        return [(source, taken) for taken, sources in self.feeders.items() for source in sources]

    def successors(self, tool: str) -> list[str]:
        """The tools that something of this one's result feeds."""
        found = {taken.tool for source, taken in self.edges if source.tool == tool}
        return sorted(found)

    def route(self, first: str, last: str) -> list[str] | None:
        """The tools of a shortest way of data from one to another, both included; None where there is none."""
        ways, seen = [[first]], {first}
        while ways:
            way = ways.pop(0)
            for tool in self.successors(way[-1]):
                if tool == last:
                    return [*way, last]
                if tool not in seen:
                    seen.add(tool)
                    ways.append([*way, tool])
        return None


def feeds(source: ReturnNode, taken: ParameterNode) -> bool:
    return names_fit(source, taken) and fits(source.schema, taken.schema)


def names_fit(source: ReturnNode, taken: ParameterNode) -> bool:
    """Whether the two are called the same, where they stand taken into account."""
    wanted = words(taken.name)
    keys = [step for step in source.place if isinstance(step, str)]
    own = words(keys[-1]) if keys and keys[-1] not in _WRAPPERS else []
    around = [word for key in keys[:-1] for word in words(key)] + words(source.tool)
    if not own:  # the whole result, whose name is the tool's: find_flight_id
        return len(wanted) > 1 and words(source.tool)[-len(wanted) :] == wanted
    if own == wanted:
        return len(own) > 1 or own[0] not in _GENERIC or bool(set(around) & set(words(taken.tool)))
    is_end = len(own) < len(wanted) and wanted[-len(own) :] == own
    return is_end and set(wanted[: -len(own)]) <= set(around)


def words(name: str) -> list[str]:
    """The words of a name, in lower case and singular: flightIds is [flight, id]."""
    found = [word.lower() for word in _WORD.findall(name)]
    return [_singular(word) for word in found] or [name.lower()]


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word


def _parameters(spec: ToolSpec) -> Iterator[ParameterNode]:
    takes = inlined(spec.parameters)
    required = takes.get("required", ())
    for name, schema in takes.get("properties", {}).items():
        yield ParameterNode(spec.name, name, schema, name in required)


def _inside(tool: str, place: Place, schema: Any, certain: bool, depth: int) -> Iterator[ReturnNode]:
    """The value itself, and what stands in it."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return
    if isinstance(
        schema.get("anyOf"), list
    ):  # what may be missing: the one alternative that is not null
        others = [one for one in schema["anyOf"] if one != {"type": "null"}]
        if len(others) == 1:
            yield from _inside(tool, place, others[0], False, depth + 1)
        return
    if not types_of(schema):
        return
    yield ReturnNode(tool, place, schema, certain)
    if schema.get("type") == "object":
        required = schema.get("required", ())
        for name, inner in schema.get("properties", {}).items():
            yield from _inside(tool, (*place, name), inner, certain and name in required, depth + 1)
    if schema.get("type") == "array":
        has_first = certain and schema.get("minItems", 0) > 0
        yield from _inside(tool, (*place, 0), schema.get("items"), has_first, depth + 1)


# Does whatever one JSON Schema allows fit another one? What a tool returns, for what another one takes.

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
_DEEPEST_SCHEMA = 6
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
    if depth > _DEEPEST_SCHEMA or wanted.keys() - _KNOWN:
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
