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
from collections.abc import Sequence
from urllib.parse import urlsplit

from ludus.core.failures import ConfigError, Fault
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.tools.remote.calls import Attempts
from ludus.tools.remote.episodes import Episode, RemoteCounters, Session, Sessions
from ludus.tools.remote.patience import Contact, Patience
from ludus.tools.remote.replies import is_loopback, normalized, unsendable
from ludus.tools.remote.transport import Broken, NotSent, Reply, Transport, own_token
from ludus.tools.toolset import malformed, unknown_tool

_log = logging.getLogger(__name__)

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
        self._transport = Transport(_token(addresses) if token is None else token, connections)
        self._sessions = Sessions(self._transport, addresses, tools)
        self._episodes: dict[str, Episode] = {}
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
        attempts = Attempts(
            episode, body, self._sessions, self._transport, patience, self._tell_cancelled
        )
        return await attempts.result()

    async def close(self, context: ToolContext) -> None:
        """Tell the server; one that cannot be told closes the session by itself, when it is idle."""
        episode = self._episodes.pop(context.episode, None)
        if episode is not None and episode.session is not None:
            await self._tell(episode.session.url)

    async def aclose(self) -> None:
        """Close the connections. Sessions still open end when they are idle."""
        if self._telling:
            await asyncio.wait(self._telling, timeout=_CLOSE_SECONDS)
        await self._transport.close()

    async def __aenter__(self) -> RemoteTools:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _episode(self, context: ToolContext) -> Episode:
        found = self._episodes.get(context.episode)
        if found is None:
            found = self._episodes[context.episode] = Episode(context)
        return found

    def _patience(self) -> Patience:
        return Patience(self._deadline, self._unreachable_seconds, self._contact)

    async def _described(self, session: Session, patience: Patience) -> Reply:
        while True:
            patience.attempts += 1
            try:
                reply = await self._transport.send("GET", session.url, None, patience.seconds_left)
            except (NotSent, Broken) as error:
                patience.unreachable()
                await patience.pause(str(error))
            except TimeoutError as error:
                raise patience.too_late() from error
            else:
                patience.reached()
                return reply

    def _tell_cancelled(self, session: Session, key: str) -> None:
        """In the background: whoever was waiting has been told to stop waiting."""
        work = self._tell(f"{session.url}/calls/{key}")
        task = asyncio.get_running_loop().create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, url: str) -> None:
        try:
            await self._transport.send("DELETE", url, None, _CLOSE_SECONDS)
        except (NotSent, Broken, TimeoutError) as error:
            _log.info("the server could not be told that something ended: %s", error)


def _token(addresses: Sequence[str]) -> str | None:
    """The environment's token; or, where all servers are on our own loopback, that of our user."""
    given = os.environ.get("LUDUS_TOKEN")
    if given is not None or not all(is_loopback(urlsplit(one).hostname or "") for one in addresses):
        return given or None
    with contextlib.suppress(OSError):  # then the server has none either, or was given one
        return own_token()[0]
    return None
