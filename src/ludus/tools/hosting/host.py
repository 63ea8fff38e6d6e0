"""The seam between a tool server and whatever runs the tools: an event loop, processes, a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.tools.tool import Tool
from ludus.tools.toolset import CombinedTools, LocalTools


class EpisodeLost(InfraError):
    """What an episode had built up in its tools is gone. No call brings it back; playing it again does."""

    def __init__(self, message: str, *, attempts: int = 1) -> None:
        super().__init__(Boundary.SERVER, message, attempts=attempts, retriable=False, replay=True)


class OutcomeUnknown(InfraError):
    """A call may have taken effect or not, and its tool does not allow to find out by repeating it."""

    def __init__(self, message: str, *, attempts: int = 1) -> None:
        super().__init__(Boundary.SERVER, message, attempts=attempts, retriable=False)


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """What a host's caller must know of a tool before it calls it."""

    spec: ToolSpec
    repeatable: bool = False
    """Whether a call may run again when nobody knows how its first run ended (`Tool.retries > 0`)."""
    stateful: bool = True
    """Whether a call may leave something behind in the episode that later calls need."""
    concurrency: int | None = None
    """How many calls may run at once."""


@dataclass(frozen=True, slots=True)
class HostHealth:
    """Numbers for health checks and metrics."""

    running: int
    """Calls inside the host now."""
    workers: int = 1
    """How many workers there should be."""
    alive: int = 1
    """How many of them can take calls."""
    restarted: int = 0
    """How many were replaced since the start."""


class ToolHost(Protocol):
    """Hosts one set of tools for many episodes. It has no queue: its caller decides what may enter.

    A caller ends a call early by cancelling it; a host hands the cancellation on to whoever runs it.
    """

    async def start(self) -> Sequence[ToolFacts]:
        """Build the tools, and say what they are; `ConfigError` where they cannot be hosted."""

    async def open(self, context: ToolContext) -> None:
        """Get ready for an episode."""

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        """The tools that the episode can call now."""

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Run one call. The model's faults come back as results; failures of ours raise `InfraError`."""

    async def close(self, context: ToolContext) -> None:
        """Release what the episode held; unknown episodes are ignored."""

    async def stop(self) -> None:
        """Stop everything, at once."""

    def health(self) -> HostHealth:
        """How it is doing."""


async def facts_of(tools: ToolSet) -> list[ToolFacts]:
    """The facts of a set's tools; `ConfigError` where one needs what a server does not have."""
    from ludus.core.task import Task

    known = {tool.name: tool for tool in _members(tools)}
    needy = [tool.name for tool in known.values() if tool.signature.env is not None]
    if needy:
        raise ConfigError(
            f"the tool {needy[0]!r} needs an environment (its parameter 'env'), which lives where the "
            "episode is played; a server cannot host it, so give it to the run directly"
        )
    context = ToolContext("probe", Task("", ()))
    await tools.open(context)
    try:
        specs = await tools.list(context)
    finally:
        await tools.close(context)
    return [_facts(spec, known.get(spec.name)) for spec in specs]


def _facts(spec: ToolSpec, tool: Tool | None) -> ToolFacts:
    if tool is None:  # a set of its own kind: nothing is known, so nothing is assumed
        return ToolFacts(spec)
    stateful = getattr(tool, "stateful", tool.signature.context is not None)
    return ToolFacts(spec, tool.retries > 0, bool(stateful), tool.max_concurrency)


def _members(tools: ToolSet | Any) -> Iterable[Tool]:
    if isinstance(tools, LocalTools):
        yield from tools._tools.values()
    elif isinstance(tools, CombinedTools):
        for one in tools._sets:
            yield from _members(one)
