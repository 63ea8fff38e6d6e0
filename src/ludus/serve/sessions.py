"""Server sessions: the episodes that a server holds open, and when it closes them.

Who waits for whom. Opening a session is a task: requests that open it again, or call in it, wait for that
task. A request to open waits `_OPEN_SECONDS` at most and then fails with "ask again", which keeps the session's
place in the queue for an instance: so a client knows a server that is busy from one that hangs. So is closing
one: it cancels the session's running calls, waits for them, then lets the host release the episode, whether or
not the client that asked for it still waits. A sweeper closes sessions that were not used for `idle_seconds`; a
session with a running call is in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.core.failures import ConfigError, InfraError
from ludus.core.messages import Json, ToolContext, ToolSpec
from ludus.serve.admission import Admission, RequestError, Ticket
from ludus.serve.telemetry import Metrics
from ludus.tools.hosting import ToolHost
from ludus.tools.wire import ErrorKind, OpenBody

_log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_OPEN_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.05

OPENING = "(open)"
"""The admission queue for opening sessions, beside those of the tools."""


@dataclass(slots=True, eq=False)
class ServerSession:
    """One open episode."""

    id: str
    episode: str
    context: ToolContext
    wanted: frozenset[str] | None
    used: float
    opening: asyncio.Task[None] | None = None
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    closing: asyncio.Task[None] | None = None

    def wants(self, tool: str) -> bool:
        return self.wanted is None or tool in self.wanted


class ServerSessions:
    """All open sessions of a server, by id."""

    def __init__(
        self, host: ToolHost, admission: Admission, metrics: Metrics, most: int, idle_seconds: float
    ) -> None:
        self._host, self._admission, self._metrics = host, admission, metrics
        self._most, self._idle_seconds = most, idle_seconds
        self._sessions: dict[str, ServerSession] = {}
        self._episodes: set[str] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    async def get(self, id: str) -> ServerSession:
        """An open session; one that is being opened is waited for."""
        session = self._sessions.get(id)
        if session is not None and session.opening is not None:
            await self._joined(session.opening)
        if session is None or session.closing is not None:
            message = (
                f"there is no session {id!r} here: it expired, was closed, or this server is a new one"
            )
            raise RequestError(ErrorKind.SESSION_UNKNOWN, message)
        session.used = _now()
        return session

    async def open(self, body: OpenBody, deadline: float | None) -> tuple[ServerSession, bool]:
        """The session, and whether it is new: an earlier request with the same id may have opened it."""
        session = self._sessions.get(body.session)
        is_new = session is None
        if session is None:
            session = self._begin(body)
        elif session.episode != body.episode:
            message = f"the session {body.session!r} belongs to another episode"
            raise RequestError(ErrorKind.KEY_REUSED, message)
        if session.opening is not None:
            # a request to open has to be answered before its own deadline
            left = math.inf if deadline is None else 0.8 * max(0.0, deadline - _now())
            await self._joined(session.opening, min(_OPEN_SECONDS, left))
        if session.closing is not None:
            raise RequestError(
                ErrorKind.SESSION_UNKNOWN, f"the session {body.session!r} is being closed"
            )
        session.used = _now()
        return session, is_new

    async def _joined(self, opening: asyncio.Task[None], seconds: float | None = None) -> None:
        await asyncio.wait((opening,), timeout=seconds)
        if not opening.done():
            message = await self._why_it_waits()
            raise RequestError(ErrorKind.OVERLOADED, message, retry_after=_ASK_AGAIN_SECONDS)
        if opening.cancelled():
            raise RequestError(ErrorKind.SESSION_UNKNOWN, "the session was closed while it was opened")
        error = opening.exception()
        if isinstance(error, InfraError):
            raise RequestError.of(error) from error
        if error is not None:
            raise error

    async def _why_it_waits(self) -> str:
        """Message to a client whose session is not open yet."""
        stats: Json = {}
        with contextlib.suppress(InfraError, TimeoutError):  # the answer matters more than its details
            async with asyncio.timeout(1.0):
                stats = await self._host.ask("stats", None, {})
        full = [
            f"{one['in_use']} of {one['size']} instances of {name!r} are in use and {one['waiting']} sessions "
            "wait"
            for name, one in stats.items()
            if one["waiting"]
        ]
        if not full:
            return "the session is still being opened"
        return (
            f"{'; '.join(full)}: start the server with a larger --size, or play fewer episodes at once"
        )

    def _begin(self, body: OpenBody) -> ServerSession:
        if len(self._sessions) >= self._most:
            message = f"{len(self._sessions)} sessions are open already"
            raise RequestError(ErrorKind.OVERLOADED, message, retry_after=1.0)
        ticket = self._admission.enter(OPENING, None)  # it outlives the request, which is repeated
        # Two clients may use the same episode name; tools keep state by episode, so it must be unique here.
        unique = body.episode not in self._episodes
        episode = body.episode if unique else f"{body.episode}~{secrets.token_hex(8)}"
        context = ToolContext(episode, body.task)
        wanted = None if body.tools is None else frozenset(body.tools)
        session = ServerSession(body.session, body.episode, context, wanted, _now())
        self._sessions[session.id] = session
        self._episodes.add(episode)

        session.opening = asyncio.create_task(self._open(context, ticket))
        # By callback: a task that is cancelled before its first step runs none of its own code.
        session.opening.add_done_callback(lambda task: self._opened(session, ticket, task))
        return session

    async def _open(self, context: ToolContext, ticket: Ticket) -> None:
        try:
            await ticket.granted()
            await self._host.open(context)
        except (RequestError, InfraError):
            raise
        except ConfigError as error:
            raise RequestError(ErrorKind.BAD_TASK, str(error)) from error
        except Exception as error:
            message = f"the tools could not be opened: {type(error).__name__}: {error}"
            raise RequestError(ErrorKind.FAILED, message, started=True) from error

    def _opened(self, session: ServerSession, ticket: Ticket, task: asyncio.Task[None]) -> None:
        ticket.leave()
        session.opening = None
        session.used = _now()
        if task.cancelled() or task.exception() is not None:
            self._forget(session)
        else:
            self._metrics.opened.inc()

    async def tools(self, session: ServerSession) -> Sequence[ToolSpec]:
        """The session's current tools."""
        try:
            specs = await self._host.list(session.context)
        except InfraError as error:
            raise RequestError.of(error) from error
        return [spec for spec in specs if session.wants(spec.name)]

    async def observations(self, session: ServerSession) -> Json:
        """The last observation of each of the session's environments."""
        try:
            return await self._host.ask("opened", session.context, {})
        except InfraError as error:
            raise RequestError.of(error) from error

    async def close(self, id: str, why: str) -> bool:
        """Close a session and cancel its running calls; returns whether there was one."""
        session = self._sessions.get(id)
        if session is None:
            return False
        is_first = session.closing is None
        if session.closing is None:
            session.closing = asyncio.create_task(self._close(session, why))
        await asyncio.shield(session.closing)
        return is_first

    async def _close(self, session: ServerSession, why: str) -> None:
        if session.opening is not None:
            session.opening.cancel()
            await asyncio.wait((session.opening,))
        running = list(session.calls)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._host.close(session.context)
        except Exception:  # noqa: BLE001 - a tool's own clean-up; nothing a client could do about it
            _log.exception("closing the session %s failed", session.id)
        self._forget(session)
        self._metrics.closed.labels(why).inc()

    async def close_all(self, why: str) -> None:
        await asyncio.gather(*(self.close(id, why) for id in list(self._sessions)))

    async def sweep(self) -> None:
        """Close idle sessions from time to time, until cancelled."""
        while True:
            await asyncio.sleep(min(30.0, self._idle_seconds / 4))
            oldest = _now() - self._idle_seconds
            idle = [
                session.id
                for session in self._sessions.values()
                if session.used < oldest and not session.calls and session.opening is None
            ]
            await asyncio.gather(*(self.close(id, "idle") for id in idle))

    def _forget(self, session: ServerSession) -> None:
        self._sessions.pop(session.id, None)
        self._episodes.discard(session.context.episode)


def _now() -> float:
    return asyncio.get_running_loop().time()
