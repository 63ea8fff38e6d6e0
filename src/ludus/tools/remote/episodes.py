"""The sessions that a client holds, one per episode, and what becomes of those that are lost.

Who waits for whom. One lock per episode makes sure that a session that was lost is opened again once, however
many calls of the episode notice. A session is opened again silently only while no stateful tool was called in
it; otherwise what the episode had built up is gone, and every further call says so.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.core.messages import ToolContext, ToolSpec
from ludus.tools.hosting.encoding import dump, spec_from_json, task_to_json
from ludus.tools.hosting.host import EpisodeLost
from ludus.tools.remote.patience import Patience
from ludus.tools.remote.replies import error_of, failure_of, in_order, nonsense, retry_after
from ludus.tools.remote.transport import Broken, NotSent, Reply, Transport
from ludus.tools.remote.wire import ErrorKind

NOT_TAKEN = frozenset({ErrorKind.OVERLOADED, ErrorKind.DRAINING})
SESSION_GONE = frozenset({ErrorKind.SESSION_UNKNOWN, ErrorKind.SESSION_LOST})


@dataclass(slots=True)
class RemoteCounters:
    """What a client had to do beyond sending each call once."""

    retries: int = 0
    """Attempts after the first."""
    refused: int = 0
    """Attempts that a server did not take, being full or about to stop."""
    reopened: int = 0
    """Sessions opened again, nothing being lost."""
    repeated: int = 0
    """Calls sent to another server process although an earlier attempt may have run."""
    lost: int = 0
    """Episodes whose state was lost."""


@dataclass(slots=True, eq=False)
class Session:
    """A session as its server described it. `touched`: a stateful tool may have run in it."""

    id: str
    address: str
    instance: str
    specs: list[ToolSpec] = field(default_factory=list)
    repeatable: dict[str, bool] = field(default_factory=dict)
    stateful: dict[str, bool] = field(default_factory=dict)
    touched: bool = False
    fresh: bool = True

    @property
    def url(self) -> str:
        return f"{self.address}/v1/sessions/{self.id}"

    def learn(self, body: Mapping[str, Any]) -> None:
        """Take over what the server says of its tools."""
        try:
            self.specs = [spec_from_json(raw) for raw in body["tools"]]
            self.repeatable = {raw["name"]: bool(raw["repeatable"]) for raw in body["tools"]}
            self.stateful = {raw["name"]: bool(raw["stateful"]) for raw in body["tools"]}
        except (KeyError, TypeError) as error:
            raise nonsense(f"{self.address}: {error!r}") from error


@dataclass(slots=True, eq=False)
class Episode:
    """An episode, its session if it has one, and why its state is gone if it is."""

    context: ToolContext
    session: Session | None = None
    lost: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """Opens sessions, and opens them again where nothing is lost by it."""

    def __init__(
        self, transport: Transport, addresses: Sequence[str], wanted: Sequence[str] | None
    ) -> None:
        self.addresses, self.counters = list(addresses), RemoteCounters()
        self._transport, self._wanted = transport, None if wanted is None else list(wanted)

    async def of(self, episode: Episode, patience: Patience) -> Session:
        """The episode's session, opened if need be; `EpisodeLost` once its state is gone."""
        if episode.lost:
            raise _lost(episode.lost, 1)
        if episode.session is None:
            async with episode.lock:
                if episode.session is None:
                    episode.session = await self._opened(episode.context, patience)
        return episode.session

    def let_go(self, episode: Episode, session: Session) -> None:
        """The next call opens another one."""
        if episode.session is session:
            episode.session = None
            self.counters.reopened += 1

    async def refused(
        self, episode: Episode, session: Session, reply: Reply, patience: Patience
    ) -> None:
        """An answer without a result: pause and return to try again, or raise what it means."""
        kind, message, error = error_of(reply)
        if kind in NOT_TAKEN:
            self.counters.refused += 1
            if kind is ErrorKind.DRAINING and len(self.addresses) > 1 and not session.touched:
                self.let_go(episode, session)
            await patience.pause(message, retry_after(error))
        elif kind in SESSION_GONE:
            if session.touched:
                self.counters.lost += not episode.lost
                episode.lost = episode.lost or message
                raise _lost(message, patience.attempts)
            self.let_go(episode, session)
            await patience.pause(message)
        else:
            raise failure_of(kind, message, error, patience.attempts)

    async def _opened(self, context: ToolContext, patience: Patience) -> Session:
        """A new session on the episode's own server, or on the next one that takes it."""
        addresses = in_order(self.addresses, context.episode)
        ids = {address: secrets.token_hex(12) for address in addresses}
        body = {"episode": context.episode, "task": task_to_json(context.task), "tools": self._wanted}
        while True:
            problem, wait = "", 0.0
            for address in addresses:
                data = dump({**body, "session": ids[address]})
                patience.attempts += 1
                url = f"{address}/v1/sessions"
                try:
                    reply = await self._transport.send("POST", url, data, patience.seconds_left)
                except (NotSent, Broken) as error:
                    problem = str(error)
                    continue
                except TimeoutError as error:
                    raise patience.too_late() from error
                patience.reached()
                if reply.status in (200, 201):
                    session = Session(ids[address], address, reply.instance)
                    session.learn(reply.body)
                    return session
                kind, problem, error_body = error_of(reply)
                if kind not in NOT_TAKEN:
                    raise failure_of(kind, problem, error_body, patience.attempts)
                self.counters.refused += 1
                wait = max(wait, retry_after(error_body))
            if not wait:
                patience.unreachable()
            await patience.pause(problem, wait)


def _lost(why: str, attempts: int) -> EpisodeLost:
    message = f"what the episode had built up in its tools is gone: {why}"
    return EpisodeLost(message, attempts=attempts)
