"""One call with all its attempts.

What a lost answer means. Every call has a random key; the server runs a key once, so asking again is safe as
long as the same server process answers. When another one does (it was restarted, or the episode moved), nobody
knows whether the first attempt ran: a tool that may be repeated is, which is counted and logged; any other
raises `OutcomeUnknown`. The server checks the same again, by what the retry says of its first attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ludus.core.failures import Fault
from ludus.core.messages import Json, ToolResult
from ludus.tools.hosting.encoding import dump
from ludus.tools.hosting.host import OutcomeUnknown
from ludus.tools.remote.episodes import SESSION_GONE, Episode, Session, Sessions
from ludus.tools.remote.patience import Patience
from ludus.tools.remote.replies import error_of, result_of
from ludus.tools.remote.transport import Broken, NotSent, Reply, Transport
from ludus.tools.remote.wire import ErrorKind

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """The first attempt whose fate is unknown."""

    instance: str
    at: float


class Attempts:
    """Sends one call until it has a result, or until its failure is certain."""

    def __init__(
        self,
        episode: Episode,
        body: Json,
        sessions: Sessions,
        transport: Transport,
        patience: Patience,
        abandon: Callable[[Session, str], None],
    ) -> None:
        """`abandon` is told of a call that the server may be running and nobody waits for any more."""
        self._episode, self._body, self._name = episode, body, str(body["name"])
        self._sessions, self._transport, self._patience = sessions, transport, patience
        self._abandon = abandon
        self._sent: _Sent | None = None
        self._is_first = True

    async def result(self) -> ToolResult:
        patience = self._patience
        while True:
            session = await self._sessions.of(self._episode, patience)
            stateful = session.stateful.get(self._name, True)
            began = time.monotonic()
            try:
                reply = await self._attempt(session)
            except NotSent as error:
                self._move(session)
                await self._unreachable(session, error)
                continue
            except Broken as error:
                session.touched = session.touched or stateful
                self._sent = self._sent or _Sent(session.instance, began)
                await self._unreachable(session, error)
                continue
            patience.reached()
            session.fresh = False
            if reply.status == 200:
                result = result_of(reply)
                session.touched |= stateful and result.fault is not Fault.UNKNOWN_TOOL
                return result
            kind, _, error_body = error_of(reply)
            if kind is ErrorKind.TOO_LARGE:
                return ToolResult(
                    f"{self._name}: the arguments are too large", fault=Fault.BAD_ARGUMENTS
                )
            session.touched = session.touched or (stateful and bool(error_body.get("started")))
            if kind in SESSION_GONE and self._sent is not None and not session.touched:
                self._check_repeat(session)
            await self._sessions.refused(self._episode, session, reply, patience)

    async def _attempt(self, session: Session) -> Reply:
        self._patience.attempts += 1
        self._sessions.counters.retries += not self._is_first
        self._is_first = False
        if self._sent is not None:
            age_ms = (time.monotonic() - self._sent.at) * 1000
            self._body["retry"] = {"instance": self._sent.instance, "age_ms": age_ms}
        url, data = f"{session.url}/calls", dump(self._body)
        try:
            return await self._transport.send("POST", url, data, self._patience.seconds_left)
        except TimeoutError as error:
            self._abandon(session, self._body["key"])
            raise self._patience.too_late() from error
        except asyncio.CancelledError:
            self._abandon(session, self._body["key"])
            raise

    def _move(self, session: Session) -> None:
        """Look for another server, where there is one and nothing would be lost or wrongly repeated."""
        may_repeat = self._sent is None or session.repeatable.get(self._name, False)
        if len(self._sessions.addresses) > 1 and not session.touched and may_repeat:
            self._sessions.let_go(self._episode, session)
            if self._sent is not None:
                self._count_repeat()

    async def _unreachable(self, session: Session, error: Exception) -> None:
        """Pause, or give up; and then it matters whether the call may have run."""
        self._patience.unreachable()
        if self._patience.gave_up and self._sent is not None:
            self._check_repeat(session)
        await self._patience.pause(str(error))

    def _check_repeat(self, session: Session) -> None:
        if not session.repeatable.get(self._name, False):
            raise OutcomeUnknown(
                f"the server went away while {self._name!r} may have run there; whether it took effect is "
                "unknown, and the tool may not be repeated (retries=0)",
                attempts=self._patience.attempts,
            )
        self._count_repeat()

    def _count_repeat(self) -> None:
        self._sessions.counters.repeated += 1
        _log.warning("%r may have run on a server process that is gone; it is repeated", self._name)
