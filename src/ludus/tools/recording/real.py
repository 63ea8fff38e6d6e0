"""The real tools behind a recording: opened once for an episode, and only when they are needed."""

from __future__ import annotations

from contextvars import ContextVar

from ludus.core.failures import Boundary, InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet
from ludus.tools.recording.session import EpisodeSession, Statistics
from ludus.tools.toolset import shut

# the episodes whose real call is running around here
_inside: ContextVar[frozenset[EpisodeSession]] = ContextVar("ludus_recording", default=frozenset())


class RealTools:
    """A tool set with lazy opening. Where there is none, nothing but `close` may be asked of it."""

    def __init__(self, inner: ToolSet | None, statistics: Statistics) -> None:
        self._inner, self._statistics = inner, statistics

    @property
    def tools(self) -> ToolSet:
        assert self._inner is not None  # only replaying does without, and it never calls
        return self._inner

    def is_inside(self, session: EpisodeSession) -> bool:
        """Whether we are called by a tool of this very episode: then its call is recorded as one."""
        return session in _inside.get()

    async def open(self, session: EpisodeSession, context: ToolContext) -> None:
        async with session.opening:
            if session.is_closed:
                raise not_open(context)
            if not session.is_open:
                await self.tools.open(context)
                session.is_open = True
                self._statistics.opened += 1

    async def call(self, session: EpisodeSession, call: ToolCall, context: ToolContext) -> ToolResult:
        await self.open(session, context)
        token = _inside.set(_inside.get() | {session})
        try:
            return await self.tools.call(call, context)
        finally:
            _inside.reset(token)

    async def shut(self) -> None:
        """Release what they hold for all episodes together."""
        if self._inner is not None:
            await shut(self._inner)

    async def close(self, session: EpisodeSession, context: ToolContext) -> None:
        async with session.opening:
            session.is_closed = True
            if session.is_open:
                await self.tools.close(context)


def not_open(context: ToolContext) -> InfraError:
    """The failure of a call that comes before `open` or after `close`."""
    message = f"a call in the episode {context.episode!r}, which is not open"
    return InfraError(Boundary.TOOL, message, retriable=False)
