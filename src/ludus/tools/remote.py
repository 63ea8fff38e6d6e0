"""Tools on a server, as a tool set: a run uses them as it uses its own, given an address.

Who waits for whom. Each call awaits its own HTTP request, and repeats it while that is safe and there is time
(`calls`). Calls of one episode share a session (`episodes`). Requests beyond `connections` wait for one of
them, within their deadline; the queue that counts is the server's, which says when it is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ludus.core.failures import ConfigError, Fault
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.tools.hosting.host import EpisodeLost, OutcomeUnknown
from ludus.tools.remote_http import (
    Contact,
    NotConnected,
    ResponseLost,
    RetryBudget,
    ServerResponse,
    ToolHttpClient,
    error_of,
    failure_of,
    in_order,
    is_loopback,
    nonsense,
    normalized,
    own_token,
    result_of,
    retry_after,
    unsendable,
)
from ludus.tools.toolset import malformed, unknown_tool
from ludus.tools.wire import ErrorKind, dump, spec_from_json, task_to_json

# The sessions that a client holds, one per episode, and what becomes of those that are lost.
#
# Who waits for whom. One lock per episode makes sure that a session that was lost is opened again once,
# however many calls of the episode notice. A session is opened again silently only while no stateful tool
# was called in it; otherwise what the episode had built up is gone, and every further call says so.

NOT_TAKEN = frozenset({ErrorKind.OVERLOADED, ErrorKind.DRAINING})
SESSION_GONE = frozenset({ErrorKind.SESSION_UNKNOWN, ErrorKind.SESSION_LOST})


@dataclass(slots=True)
class RemoteCounters:
    """What a client had to do beyond sending each call once."""

    retries: int = 0
    """CallAttempts after the first."""
    refused: int = 0
    """CallAttempts that a server did not take, being full or about to stop."""
    reopened: int = 0
    """RemoteSessions opened again, nothing being lost."""
    repeated: int = 0
    """Calls sent to another server process although an earlier attempt may have run."""
    lost: int = 0
    """Episodes whose state was lost."""


@dataclass(slots=True, eq=False)
class RemoteSession:
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
class RemoteEpisode:
    """An episode, its session if it has one, and why its state is gone if it is."""

    context: ToolContext
    session: RemoteSession | None = None
    lost: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RemoteSessions:
    """Opens sessions, and opens them again where nothing is lost by it."""

    def __init__(
        self, transport: ToolHttpClient, addresses: Sequence[str], wanted: Sequence[str] | None
    ) -> None:
        self.addresses, self.counters = list(addresses), RemoteCounters()
        self._transport, self._wanted = transport, None if wanted is None else list(wanted)

    async def of(self, episode: RemoteEpisode, patience: RetryBudget) -> RemoteSession:
        """The episode's session, opened if need be; `EpisodeLost` once its state is gone."""
        if episode.lost:
            raise _lost(episode.lost, 1)
        if episode.session is None:
            async with episode.lock:
                if episode.session is None:
                    episode.session = await self._opened(episode.context, patience)
        return episode.session

    def let_go(self, episode: RemoteEpisode, session: RemoteSession) -> None:
        """The next call opens another one."""
        if episode.session is session:
            episode.session = None
            self.counters.reopened += 1

    async def refused(
        self,
        episode: RemoteEpisode,
        session: RemoteSession,
        reply: ServerResponse,
        patience: RetryBudget,
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

    async def _opened(self, context: ToolContext, patience: RetryBudget) -> RemoteSession:
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
                except (NotConnected, ResponseLost) as error:
                    problem = str(error)
                    continue
                except TimeoutError as error:
                    raise patience.too_late() from error
                patience.reached()
                if reply.status in (200, 201):
                    session = RemoteSession(ids[address], address, reply.instance)
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


# One call with all its attempts.
#
# What a lost answer means. Every call has a random key; the server runs a key once, so asking again is
# safe as long as the same server process answers. When another one does (it was restarted, or the episode
# moved), nobody knows whether the first attempt ran: a tool that may be repeated is, which is counted and
# logged; any other raises `OutcomeUnknown`. The server checks the same again, by what the retry says of
# its first attempt.

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """The first attempt whose fate is unknown."""

    instance: str
    at: float


class CallAttempts:
    """Sends one call until it has a result, or until its failure is certain."""

    def __init__(
        self,
        episode: RemoteEpisode,
        body: Json,
        sessions: RemoteSessions,
        transport: ToolHttpClient,
        patience: RetryBudget,
        abandon: Callable[[RemoteSession, str], None],
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
            except NotConnected as error:
                self._move(session)
                await self._unreachable(session, error)
                continue
            except ResponseLost as error:
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

    async def _attempt(self, session: RemoteSession) -> ServerResponse:
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

    def _move(self, session: RemoteSession) -> None:
        """Look for another server, where there is one and nothing would be lost or wrongly repeated."""
        may_repeat = self._sent is None or session.repeatable.get(self._name, False)
        if len(self._sessions.addresses) > 1 and not session.touched and may_repeat:
            self._sessions.let_go(self._episode, session)
            if self._sent is not None:
                self._count_repeat()

    async def _unreachable(self, session: RemoteSession, error: Exception) -> None:
        """Pause, or give up; and then it matters whether the call may have run."""
        self._patience.unreachable()
        if self._patience.gave_up and self._sent is not None:
            self._check_repeat(session)
        await self._patience.pause(str(error))

    def _check_repeat(self, session: RemoteSession) -> None:
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


# Tools on a server, as a tool set: a run uses them as it uses its own, given an address.
#
# Who waits for whom. Each call awaits its own HTTP request, and repeats it while that is safe and there is
# time (`calls`). Calls of one episode share a session (`episodes`). Requests beyond `connections` wait for
# one of them, within their deadline; the queue that counts is the server's, which says when it is full.


_LONGEST_NAME = 1024
_CLOSE_SECONDS = 10.0


class RemoteTools:
    """Tools on one or several servers. An episode keeps to one server, chosen by a hash of its name."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        token: str | None = None,
        tools: Sequence[str] | None = None,
        deadline: float = 300.0,
        unreachable_seconds: float = 60.0,
        connections: int = 1024,
    ) -> None:
        """`tools` are the names wanted, all when left out. `deadline` bounds one call with all its
        attempts; a server that cannot be reached is tried for `unreachable_seconds`. At most
        `connections` requests are on their way at once, the rest wait here. The token is `LUDUS_TOKEN`
        from the environment when left out; servers on this machine's loopback get our user's own."""
        given = [address] if isinstance(address, str) else list(address)
        if not given:
            raise ConfigError("remote tools need at least one address, such as http://127.0.0.1:8700")
        self._deadline, self._unreachable_seconds = deadline, unreachable_seconds
        self._contact = Contact()
        addresses = [normalized(one) for one in given]
        self._transport = ToolHttpClient(_token(addresses) if token is None else token, connections)
        self._sessions = RemoteSessions(self._transport, addresses, tools)
        self._episodes: dict[str, RemoteEpisode] = {}
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> RemoteCounters:
        """What it took so far, beyond sending each call once."""
        return self._sessions.counters

    async def open(self, context: ToolContext) -> None:
        if context.episode in self._episodes:
            await self.close(context)
        try:
            await self._sessions.of(self._episode(context), self._patience())
        except BaseException:
            self._episodes.pop(context.episode, None)
            raise

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        episode, patience = self._episode(context), self._patience()
        while True:
            session = await self._sessions.of(episode, patience)
            if session.fresh:  # nothing has happened since the server last said
                return session.specs
            reply = await self._described(session, patience)
            if reply.status == 200:
                session.learn(reply.body)
                return session.specs
            await self._sessions.refused(episode, session, reply, patience)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.fault is not None:
            return malformed(call)
        if len(call.name) > _LONGEST_NAME:
            return unknown_tool(call.name, ())
        problem = unsendable(call.arguments)
        if problem:
            return ToolResult(f"{call.name}: {problem}", fault=Fault.BAD_ARGUMENTS)
        body: Json = {"key": secrets.token_hex(12), "name": call.name, "arguments": call.arguments}
        body["id"] = call.id[:_LONGEST_NAME]
        episode, patience = self._episode(context), self._patience()
        attempts = CallAttempts(
            episode, body, self._sessions, self._transport, patience, self._tell_cancelled
        )
        return await attempts.result()

    async def close(self, context: ToolContext) -> None:
        """Tell the server; one that cannot be told closes the session by itself, when it is idle."""
        episode = self._episodes.pop(context.episode, None)
        if episode is not None and episode.session is not None:
            await self._tell(episode.session.url)

    async def aclose(self) -> None:
        """Close the connections. RemoteSessions still open end when they are idle."""
        if self._telling:
            await asyncio.wait(self._telling, timeout=_CLOSE_SECONDS)
        await self._transport.close()

    async def __aenter__(self) -> RemoteTools:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _episode(self, context: ToolContext) -> RemoteEpisode:
        found = self._episodes.get(context.episode)
        if found is None:
            found = self._episodes[context.episode] = RemoteEpisode(context)
        return found

    def _patience(self) -> RetryBudget:
        return RetryBudget(self._deadline, self._unreachable_seconds, self._contact)

    async def _described(self, session: RemoteSession, patience: RetryBudget) -> ServerResponse:
        while True:
            patience.attempts += 1
            try:
                reply = await self._transport.send("GET", session.url, None, patience.seconds_left)
            except (NotConnected, ResponseLost) as error:
                patience.unreachable()
                await patience.pause(str(error))
            except TimeoutError as error:
                raise patience.too_late() from error
            else:
                patience.reached()
                return reply

    def _tell_cancelled(self, session: RemoteSession, key: str) -> None:
        """In the background: whoever was waiting has been told to stop waiting."""
        work = self._tell(f"{session.url}/calls/{key}")
        task = asyncio.get_running_loop().create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, url: str) -> None:
        try:
            await self._transport.send("DELETE", url, None, _CLOSE_SECONDS)
        except (NotConnected, ResponseLost, TimeoutError) as error:
            _log.info("the server could not be told that something ended: %s", error)


def _token(addresses: Sequence[str]) -> str | None:
    """The environment's token; or, where all servers are on our own loopback, that of our user."""
    given = os.environ.get("LUDUS_TOKEN")
    if given is not None or not all(is_loopback(urlsplit(one).hostname or "") for one in addresses):
        return given or None
    with contextlib.suppress(OSError):  # then the server has none either, or was given one
        return own_token()[0]
    return None
