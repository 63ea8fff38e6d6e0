"""Paths through the graph of signatures: calls whose every argument has a source. Magnet's two operations.

MAGNIFY takes one tool and spells out what stands behind it: what another tool's result holds is had from there,
and so on, down to what only the user knows. CONNECT takes two tools between which nothing flows directly, and
finds calls that lead from one to the other. Either way a path is legal by construction: an argument comes from
the user, or from the result of an earlier call whose name and type fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from ludus.core.messages import Json, ToolResult
from ludus.synth.paths.signatures import ParameterNode, Place, ReturnNode, SignatureGraph, choices_of
from ludus.tools import example_of
from ludus.tools.json_schema import argument_problems

Operation = Literal["magnify", "connect"]
Values = Callable[[ParameterNode, Random], Any]
"""Draws a value that a user would give for a parameter."""


@dataclass(frozen=True, slots=True)
class FromUser:
    value: Any


@dataclass(frozen=True, slots=True)
class FromResult:
    """An argument that an earlier call has found out."""

    call: int
    place: Place


Source = FromUser | FromResult


@dataclass(frozen=True, slots=True)
class PathCall:
    """A call, and where each of its arguments comes from."""

    tool: str
    arguments: Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class CallPath:
    """Calls in order. `turns` says how many of them the user asks for at a time."""

    calls: tuple[PathCall, ...]
    operation: Operation
    turns: tuple[int, ...] = ()

    @property
    def tools(self) -> list[str]:
        return [call.tool for call in self.calls]

    def by_turn(self) -> Iterator[range]:
        """The numbers of the calls of each turn."""
        start = 0
        for count in self.turns or (len(self.calls),):
            yield range(start, start + count)
            start += count


class NoValue(Exception):
    """A result does not hold what a later call needs of it; the text says which."""


def bound_arguments(call: PathCall, results: Sequence[Any]) -> Json:
    """The arguments of a call, given what the earlier ones returned."""
    return {
        name: source.value if isinstance(source, FromUser) else _at(results[source.call], source.place)
        for name, source in call.arguments.items()
    }


def value_of(result: ToolResult, returns: Json | None) -> Any:
    """What a result's text holds: what fits the tool's schema, where there is one; else the JSON in it, or it.

    A server in the SDK of MCP writes a table as its JSON. Anything else stands as `result` in its schema, and
    as it is in its text: a list as one text for each item.
    """
    text = result.content
    if returns is not None and returns.get("type") == "string":
        return text
    items = _documents(text)
    value = items[0] if len(items) == 1 else text
    if returns is None or "result" not in returns.get("properties", {}):
        return value
    inner = (value, items or text, text, text.split("\n"))
    readings = (value, *({"result": one} for one in inner))
    return next((one for one in readings if not argument_problems(returns, one)), value)


def _documents(text: str) -> list[Any]:
    """The JSON values that a text consists of, one after the other; none where something else is there too."""
    found: list[Any] = []
    rest = text.strip()
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        found.append(value)
        rest = rest[end:].lstrip()
    return found


def _at(value: Any, place: Place) -> Any:
    for step in place:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            shown = "".join(f"[{one!r}]" for one in place)
            raise NoValue(f"the result has no {shown}") from None
    if value is None:
        raise NoValue("the result is null where a later call needs a value")
    return value


def schema_values(pools: Mapping[str, Sequence[Any]] | None = None) -> Values:
    """Values from `pools`, by parameter or "tool.parameter"; else from what the schema itself suggests."""
    given = dict(pools or {})

    def value(node: ParameterNode, draw: Random) -> Any:
        known = given.get(f"{node.tool}.{node.name}", given.get(node.name))
        options = (
            known or choices_of(node.schema) or node.schema.get("examples") or _defaults(node.schema)
        )
        if isinstance(options, list | tuple) and options:
            return draw.choice(list(options))
        return example_of(node.schema, draw.randrange(100))

    return value


def _defaults(schema: Json) -> list[Any]:
    return [schema["default"]] if schema.get("default") is not None else []


@dataclass(slots=True)
class PathPlanner:
    """Plans paths. The same draw plans the same path."""

    graph: SignatureGraph
    values: Values
    draw: Random
    max_calls: int = 8
    optional: float = 0.3
    """How often an optional parameter is given."""

    def magnify(self, tool: str, depth: int = 3) -> CallPath:
        """A tool, with the calls that find out what it takes."""
        calls: list[PathCall] = []
        self._add(tool, calls, depth, frozenset())
        return CallPath(tuple(calls), "magnify")

    def connect(self, first: str, last: str, depth: int = 1) -> CallPath | None:
        """Calls that lead from one tool to another; None where no data flows, or it takes too many calls."""
        route = self.graph.route(first, last)
        if route is None or first == last:
            return None
        calls: list[PathCall] = []
        before = self._add(first, calls, depth, frozenset())
        for tool in route[1:]:
            if len(calls) >= self.max_calls:
                return None
            link = self._link(route, calls, before, tool)
            before = self._add(tool, calls, depth, frozenset(route), link)
        return CallPath(tuple(calls), "connect") if len(calls) <= self.max_calls else None

    def through(self, first: str | None, last: str, given: frozenset[str] = frozenset()) -> CallPath:
        """Calls that end with `first` and then `last`, side by side; `last` is given these parameters too.

        What of the first result fits the last call is taken from it. Without a `first`, `last` begins.
        """
        calls: list[PathCall] = []
        depth = 2 if first is not None else 0
        wanted = [
            taken
            for taken in self.graph.parameters[last]
            if taken.is_required or taken.name in given or self.draw.random() < self.optional
        ]
        linked = {
            taken.name: sources
            for taken in wanted
            if (sources := [node for node in self.graph.feeders[taken] if node.tool == first])
        }
        above = frozenset({last}) if first is None else frozenset({first, last})
        arguments: dict[str, Source] = {
            taken.name: self._source(taken, calls, depth, above)
            for taken in wanted
            if taken.name not in linked
        }
        if first is not None:
            before = self._add(first, calls, depth, frozenset({last}))
            for name, sources in linked.items():
                arguments[name] = FromResult(before, self.draw.choice(sources).place)
        return CallPath((*calls, PathCall(last, arguments)), "connect" if first else "magnify")

    def in_turns(self, path: CallPath, most: int) -> CallPath:
        """The path, asked for in up to so many turns."""
        count = self.draw.randint(1, max(1, min(most, len(path.calls))))
        ends = sorted(self.draw.sample(range(1, len(path.calls)), count - 1))
        sizes = [b - a for a, b in zip([0, *ends], [*ends, len(path.calls)], strict=True)]
        return replace(path, turns=tuple(sizes))

    def _link(
        self, route: Sequence[str], calls: Sequence[PathCall], before: int, tool: str
    ) -> dict[str, Source]:
        """The argument of `tool` that must come from the call before it on the route."""
        pairs = [
            (taken.name, source)
            for taken in self.graph.parameters[tool]
            for source in self.graph.feeders[taken]
            if source.tool == calls[before].tool
        ]
        name, source = self.draw.choice(pairs)
        return {name: FromResult(before, source.place)}

    def _add(
        self,
        tool: str,
        calls: list[PathCall],
        depth: int,
        above: frozenset[str],
        given: Mapping[str, Source] | None = None,
    ) -> int:
        """Plan a call after those that it needs; its number."""
        arguments: dict[str, Source] = dict(given or {})
        for taken in self.graph.parameters[tool]:
            is_wanted = taken.is_required or self.draw.random() < self.optional
            if is_wanted and taken.name not in arguments:
                arguments[taken.name] = self._source(taken, calls, depth, above | {tool})
        calls.append(PathCall(tool, arguments))
        return len(calls) - 1

    def _source(
        self, taken: ParameterNode, calls: list[PathCall], depth: int, above: frozenset[str]
    ) -> Source:
        feeders = self.graph.feeders[taken]
        there = [
            FromResult(number, node.place)
            for number, call in enumerate(calls)
            for node in feeders
            if node.tool == call.tool
        ]
        if there:
            return self.draw.choice(there)
        # those that every result has come first; a loop of tools that feed each other ends at the user
        behind = [node for node in feeders if node.tool not in above]
        best = [node for node in behind if node.is_certain] or behind
        if best and depth > 0 and len(calls) + len(above) < self.max_calls:
            node: ReturnNode = self.draw.choice(best)
            return FromResult(self._add(node.tool, calls, depth - 1, above), node.place)
        return FromUser(self.values(taken, self.draw))


def plan_paths(
    planner: PathPlanner, count: int, *, max_turns: int = 1, operations: Sequence[Operation] = ()
) -> list[CallPath]:
    """Different paths, about half by each operation; fewer where the graph has no more."""
    tools = list(planner.graph.specs)
    wanted = operations or ("magnify", "connect")
    found: dict[str, CallPath] = {}
    for number in range(20 * count):
        if len(found) >= count:
            break
        path: CallPath | None
        if wanted[number % len(wanted)] == "connect":
            path = planner.connect(planner.draw.choice(tools), planner.draw.choice(tools))
        else:
            path = planner.magnify(planner.draw.choice(tools), planner.draw.randint(0, 3))
        if path is not None and len(path.calls) <= planner.max_calls:
            path = planner.in_turns(path, max_turns)
            found.setdefault(path_text(path), path)
    return list(found.values())


def path_text(path: CallPath) -> str:
    """The path as text that is the same for equal ones."""
    return json.dumps([[call.tool, _shown(call.arguments)] for call in path.calls], sort_keys=True)


def _shown(arguments: Mapping[str, Source]) -> Json:
    return {
        name: {"user": one.value} if isinstance(one, FromUser) else {"call": one.call, "at": one.place}
        for name, one in arguments.items()
    }
