"""Tools on the server's own event loop and threads: the light host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.tools.hosting.host import HostHealth, ToolFacts, facts_of
from ludus.tools.toolset import shut


class LocalHost:
    """Async tools run on this event loop, sync ones in daemon threads, as in a run without a server."""

    def __init__(self, build: Callable[[], ToolSet]) -> None:
        self._build = build
        self._tools: ToolSet | None = None
        self._running = 0

    async def start(self) -> Sequence[ToolFacts]:
        self._tools = self._build()
        return await facts_of(self._tools)

    async def open(self, context: ToolContext) -> None:
        await self._set.open(context)

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return await self._set.list(context)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        self._running += 1
        try:
            return await self._set.call(call, context)
        finally:
            self._running -= 1

    async def close(self, context: ToolContext) -> None:
        await self._set.close(context)

    async def stop(self) -> None:
        tools, self._tools = self._tools, None
        if tools is not None:
            await shut(tools)

    def health(self) -> HostHealth:
        return HostHealth(self._running, alive=int(self._tools is not None))

    @property
    def _set(self) -> ToolSet:
        if self._tools is None:
            raise RuntimeError("the host is not started")
        return self._tools
