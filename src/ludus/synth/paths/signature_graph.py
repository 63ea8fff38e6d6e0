"""Magnet's graph of function signatures: what tools return, what they take, and which fits where.

An edge is data flow: the `flight_id` that a search returns feeds the `flight_id` that a booking takes. Name and
type must fit. Names are compared as words; words that say little (`id`, `name`) fit only where the two tools
are about the same thing. Yin et al., "Magnet: Multi-turn Tool-use Data Synthesis and Distillation via Graph
Translation", 2025, arXiv:2503.07826.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolSpec
from ludus.synth.paths.schema_fit import fits, inlined, types_of

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
