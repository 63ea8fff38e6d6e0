"""Tool sets beside `LocalTools`: several as one, and what a set may have besides the four methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol, cast, runtime_checkable

from ludus.core.failures import CannotFork, ConfigError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.tools.calling import Encode
from ludus.tools.tool import LocalTools, Tool, duplicate_name, malformed, unknown_tool


class CombinedTools:
    """Several tool sets as one. Names must be unique over all of them, at every moment."""

    def __init__(self, sets: Iterable[ToolSet]) -> None:
        self._sets = list(sets)
        self._routes: dict[str, dict[str, ToolSet]] = {}

    @property
    def sets(self) -> Sequence[ToolSet]:
        """The sets themselves."""
        return self._sets

    async def open(self, context: ToolContext) -> None:
        opened: list[ToolSet] = []
        try:
            for one in self._sets:
                await one.open(context)
                opened.append(one)
            await self.list(context)
        except BaseException:
            self._routes.pop(context.episode, None)
            await _close_each(opened, context)
            raise

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        specs: dict[str, ToolSpec] = {}
        routes: dict[str, ToolSet] = {}
        for one in self._sets:
            for spec in await one.list(context):
                if spec.name in specs:
                    raise duplicate_name(spec.name)
                specs[spec.name], routes[spec.name] = spec, one
        self._routes[context.episode] = routes
        return [*specs.values()]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.fault is not None:
            return malformed(call)
        if call.name not in self._routes.get(context.episode, {}):
            await self.list(context)
        routes = self._routes[context.episode]
        if call.name not in routes:
            return unknown_tool(call.name, routes)
        return await routes[call.name].call(call, context)

    async def changed(self, context: ToolContext) -> bool:
        """Whether the list may differ from the one that the episode last got."""
        return any([await tools_changed(one, context) for one in self._sets])

    def effects(self) -> frozenset[str]:
        """The tools of its sets that may change something which outlives the run."""
        return frozenset[str]().union(*(effects_of(one) for one in self._sets))

    async def close(self, context: ToolContext) -> None:
        self._routes.pop(context.episode, None)
        await _close_each(self._sets, context)

    @property
    def deterministic(self) -> bool:
        return all(map(is_deterministic, self._sets))

    async def snapshot(self, context: ToolContext) -> Any:
        """The states of all sets; `CannotFork` where one cannot tell."""
        return [await snapshot_tools(one, context) for one in self._sets]

    async def restore(self, state: Any, context: ToolContext) -> None:
        for one, own in zip(self._sets, state, strict=True):
            await restore_tools(one, own, context)

    async def aclose(self) -> None:
        """Release what the sets hold for all episodes together."""
        for one in self._sets:
            await shut(one)


# What a tool set may have besides the four methods of `ToolSet`, and how it is asked where it has not


@runtime_checkable
class ChangingTools(Protocol):
    """A tool set that says whether its list may differ from the one that the episode last got."""

    async def changed(self, context: ToolContext) -> bool: ...


@runtime_checkable
class ForkingTools(Protocol):
    """A tool set that can bring another episode to the state that an episode has now."""

    async def snapshot(self, context: ToolContext) -> Any: ...

    async def restore(self, state: Any, context: ToolContext) -> None: ...


@runtime_checkable
class DeterministicTools(Protocol):
    """A tool set that says whether the same calls give the same results."""

    @property
    def deterministic(self) -> bool: ...


@runtime_checkable
class ToolsWithEffects(Protocol):
    """A tool set that names those of its tools, as last listed, which may change what outlives the run."""

    def effects(self) -> frozenset[str]: ...


@runtime_checkable
class ReadOnlyTools(Protocol):
    """A tool set that names those of its tools, as last listed, which change nothing."""

    def read_only(self) -> frozenset[str]: ...


@runtime_checkable
class ClosingTools(Protocol):
    """A tool set that holds something for all episodes together."""

    async def aclose(self) -> None: ...


@runtime_checkable
class WrappedTools(Protocol):
    """A tool set around another one, which may be missing."""

    inner: ToolSet | None


async def tools_changed(tools: ToolSet, context: ToolContext) -> bool:
    """Whether the list may have changed; most sets never change."""
    return _may_change(type(tools)) and bool(await cast(ChangingTools, tools).changed(context))


@lru_cache(maxsize=1_000)
def _may_change(kind: type[ToolSet]) -> bool:
    """Asked once for each class: every turn of every episode asks, and looking at a protocol is slow."""
    return issubclass(kind, ChangingTools)


async def snapshot_tools(tools: ToolSet, context: ToolContext) -> Any:
    """The state of a tool set in an episode; `CannotFork` where it cannot tell."""
    if not isinstance(tools, ForkingTools):
        raise CannotFork("it has no snapshot", f"the tool set {type(tools).__name__}")
    return await tools.snapshot(context)


async def restore_tools(tools: ToolSet, state: Any, context: ToolContext) -> None:
    """Bring a tool set that has been opened for another episode to a state that it gave."""
    assert isinstance(tools, ForkingTools)
    await tools.restore(state, context)


def is_deterministic(tools: ToolSet) -> bool:
    """Whether a branch may make recorded calls again and expect the same results."""
    return isinstance(tools, DeterministicTools) and bool(tools.deterministic)


def effects_of(tools: ToolSet) -> frozenset[str]:
    """Tools that a check must not try unasked."""
    return frozenset(tools.effects()) if isinstance(tools, ToolsWithEffects) else frozenset()


def read_only_of(tools: ToolSet) -> frozenset[str]:
    """Tools that say of themselves that they change nothing."""
    return frozenset(tools.read_only()) if isinstance(tools, ReadOnlyTools) else frozenset()


async def shut(tools: ToolSet) -> None:
    """Release what a tool set holds for all episodes together, where it holds anything."""
    if isinstance(tools, ClosingTools):
        await tools.aclose()


def changed_tools(before: Sequence[ToolSpec], now: Sequence[ToolSpec]) -> str:
    """Message to an agent about tools that changed during its episode; empty if none did."""
    old, new = ({spec.name: spec for spec in specs} for specs in (before, now))
    lines = [f"- gone: {name}" for name in old if name not in new]
    for name, spec in new.items():
        if old.get(name) != spec:
            told = json.dumps(spec.as_openai()["function"], ensure_ascii=False)
            lines.append(f"- {'changed' if name in old else 'new'}: {told}")
    return "\n".join(["The tools have changed:", *lines]) if lines else ""


async def _close_each(sets: Sequence[ToolSet], context: ToolContext) -> None:
    """Close all of them, whatever one of them raises; the first error is raised at the end."""
    first: Exception | None = None
    for one in reversed(sets):
        try:
            await one.close(context)
        except Exception as error:  # noqa: BLE001 - the others must be closed too
            first = first or error
    if first is not None:
        raise first


def as_toolset(things: Any, *, encode: Encode | None = None) -> ToolSet:
    """One tool set of functions, tools and tool sets, given one by one or in a list."""
    if things is None:
        things = ()
    if isinstance(things, (Tool, ToolSet)) or callable(things):
        things = [things]
    tools: list[Tool | Callable[..., Any]] = []
    sets: list[ToolSet] = []
    for thing in things:
        if isinstance(thing, Tool):
            tools.append(thing)
        elif isinstance(thing, type):
            raise ConfigError(f"{thing.__name__} is a class; give an instance of it: {thing.__name__}()")
        elif isinstance(thing, ToolSet):
            sets.append(thing)
        elif callable(thing):
            tools.append(thing)
        else:
            raise ConfigError(f"{thing!r} is neither a function, a tool nor a tool set")
    if not sets:
        return LocalTools(tools, encode=encode)
    if not tools and len(sets) == 1:
        return sets[0]
    local = [LocalTools(tools, encode=encode)] if tools else []
    return CombinedTools([*local, *sets])
