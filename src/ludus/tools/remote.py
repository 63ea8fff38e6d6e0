"""Tools on a server, as a tool set: a run uses them as it uses its own, given an address (extra `serve`).

Who waits for whom. Each call awaits its own HTTP request, and repeats it while that is safe and there is time.
Calls of one episode share a session; a lock per episode makes sure that a lost one is opened again once.
Requests beyond `connections` wait for one of them, within their deadline.

Every call has a random idempotency key; the server runs a key once, so asking again is safe as long as the
same server process answers. When another one does, the first attempt may have run without a trace:
`remote/lost_episodes.py` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from ludus.core.failures import ConfigError, Fault, InfraError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.remote.client import NotConnected, ResponseLost, UnknownHost, retry_after
from ludus.remote.limits import queueing
from ludus.remote.lost_episodes import EpisodeLost, EpisodeState, OutcomeUnknown, check_repeatable
from ludus.tools.hosting.host import UNKNOWN, ToolFacts
from ludus.tools.remote_http import (
    RetryBudget,
    ServerResponse,
    ToolHttpClient,
    error_of,
    failure_of,
    in_order,
    is_loopback,
    normalized,
    own_token,
    protocol_error,
    result_of,
    unsendable,
)
from ludus.tools.tool import malformed, unknown_tool
from ludus.tools.wire import ErrorKind, dump, spec_from_json, task_to_json

__all__ = ["EpisodeLost", "OutcomeUnknown", "RemoteCounters", "RemoteTools"]

_log = logging.getLogger(__name__)

_MAX_NAME_CHARS = 1024
_CLOSE_SECONDS = 10.0
_OPEN_SECONDS = 30.0
"""A server answers an opening sooner, if only that the session has to wait; or it hangs."""
_NOT_TAKEN = frozenset({ErrorKind.OVERLOADED, ErrorKind.DRAINING})
_SESSION_GONE = frozenset({ErrorKind.SESSION_UNKNOWN, ErrorKind.SESSION_LOST})


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
class _RemoteSession:
    """A session as its server described it."""

    id: str
    address: str
    instance: str
    tools: dict[str, ToolFacts] = field(default_factory=dict)
    envs: Json = field(default_factory=dict)
    """The environments that it holds, and what each showed."""
    has_state: bool = False
    """Whether a stateful tool may have run in it."""
    is_fresh: bool = True
    """Whether nothing has happened since the server last listed its tools."""

    @property
    def url(self) -> str:
        return f"{self.address}/v1/sessions/{self.id}"

    @property
    def specs(self) -> list[ToolSpec]:
        return [facts.spec for facts in self.tools.values()]

    def learn(self, body: Mapping[str, Any]) -> None:
        """Take over what the server says of its tools."""
        try:
            self.tools = {
                raw["name"]: ToolFacts(spec_from_json(raw), raw["repeatable"], raw["stateful"])
                for raw in body["tools"]
            }
            self.envs = dict(body.get("envs") or {})
        except (KeyError, TypeError, ValueError) as error:
            raise protocol_error(f"{self.address}: {error!r}") from error


@dataclass(slots=True, eq=False)
class _RemoteEpisode:
    """An episode, its session if it has one, and whether its state is lost."""

    context: ToolContext
    session: _RemoteSession | None = None
    state: EpisodeState = field(default_factory=EpisodeState)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True, eq=False)
class _PendingCall:
    """One call with all its attempts."""

    name: str
    body: Json
    budget: RetryBudget
    unanswered: tuple[str, float] | None = None
    """The first attempt that may have run: the server process it was sent to, and when."""


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
        self.counters = RemoteCounters()
        """What it took so far, beyond sending each call once."""
        self._deadline, self._unreachable_seconds = deadline, unreachable_seconds
        self._addresses = [normalized(one) for one in given]
        self._wanted = None if tools is None else list(tools)
        known = _token(self._addresses) if token is None else token
        self._http = ToolHttpClient(known, connections, " or ".join(self._addresses))
        self._episodes: dict[str, _RemoteEpisode] = {}
        self._cancelling: set[asyncio.Task[None]] = set()

    async def open(self, context: ToolContext) -> None:
        if context.episode in self._episodes:
            await self.close(context)
        try:
            await self._session(self._episode(context), self._budget())
        except BaseException:
            self._episodes.pop(context.episode, None)
            raise

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        episode, budget = self._episode(context), self._budget()
        session = await self._session(episode, budget)
        if not session.is_fresh:
            session, body = await self._get(episode, "", budget)
            session.learn(body)
        return session.specs

    async def observation(self, context: ToolContext, env: str) -> Any:
        """What an environment of the episode showed when its session was opened or last listed."""
        session = await self._session(self._episode(context), self._budget())
        return session.envs.get(env)

    async def ask(self, what: str, context: ToolContext, env: str) -> Json:
        """What an environment of the episode says: its "actions", its "state"."""
        path = f"/{what}?env={quote(env, safe='')}"
        return (await self._get(self._episode(context), path, self._budget()))[1]

    async def envs(self, within: float | None = None) -> Sequence[Json]:
        """The environments that the servers have; `within` is the longest to try, as usual when left out."""
        limits = [self._deadline, self._unreachable_seconds]
        budget = RetryBudget(self._http, *(min(one, within or one) for one in limits))
        problem = ""
        while True:
            for address in self._addresses:
                try:
                    response = await self._send("GET", f"{address}/v1/envs", None, budget)
                except (NotConnected, ResponseLost) as error:
                    problem = str(error)
                    if isinstance(error, UnknownHost) and within is not None:
                        raise budget.never_reached(problem) from error
                    continue
                if response.status != 200:
                    refusal = error_of(response)
                    if refusal.kind not in _NOT_TAKEN:
                        raise failure_of(refusal, budget.attempts, address)
                    problem = refusal.message
                    continue
                listed = response.body.get("envs")
                if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
                    raise protocol_error(f"{address}/v1/envs: {listed!r:.200}")
                return listed
            budget.unreachable()
            await budget.pause(problem)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.fault is not None:
            return malformed(call)
        if len(call.name) > _MAX_NAME_CHARS:
            return unknown_tool(call.name, ())
        problem = unsendable(call.arguments)
        if problem:
            return ToolResult(f"{call.name}: {problem}", fault=Fault.BAD_ARGUMENTS)
        body: Json = {"key": secrets.token_hex(12), "name": call.name, "arguments": call.arguments}
        body["id"] = call.id[:_MAX_NAME_CHARS]
        with queueing():  # at the server, as far as its answer does not say that the call ran
            return await self._result(
                self._episode(context), _PendingCall(call.name, body, self._budget())
            )

    async def close(self, context: ToolContext) -> None:
        """Tell the server; one that cannot be reached closes the session itself, when it is idle."""
        episode = self._episodes.pop(context.episode, None)
        if episode is not None and episode.session is not None:
            await self._delete(episode.session.url)

    async def aclose(self) -> None:
        """Close the connections. Sessions still open end when they are idle."""
        if self._cancelling:
            await asyncio.wait(self._cancelling, timeout=_CLOSE_SECONDS)
        await self._http.close()

    async def __aenter__(self) -> RemoteTools:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _episode(self, context: ToolContext) -> _RemoteEpisode:
        found = self._episodes.get(context.episode)
        if found is None:
            found = self._episodes[context.episode] = _RemoteEpisode(context)
        return found

    def _budget(self) -> RetryBudget:
        return RetryBudget(self._http, self._deadline, self._unreachable_seconds)

    async def _send(
        self,
        method: str,
        url: str,
        data: bytes | None,
        budget: RetryBudget,
        within: float | None = None,
    ) -> ServerResponse:
        """One attempt within the budget; `InfraError` when its time is over, `ResponseLost` after `within`."""
        budget.attempts += 1
        left = budget.seconds_left
        try:
            response = await self._http.attempt(method, url, data, min(left, within or left))
        except TimeoutError as error:
            if within is not None and within < left:
                raise ResponseLost(f"{url}: no answer within {within:g} seconds") from error
            raise budget.too_late() from error
        budget.reached()
        return response

    async def _get(
        self, episode: _RemoteEpisode, path: str, budget: RetryBudget
    ) -> tuple[_RemoteSession, Json]:
        """What the episode's server says of its session at `path`."""
        while True:
            session = await self._session(episode, budget)
            try:
                response = await self._send("GET", f"{session.url}{path}", None, budget)
            except (NotConnected, ResponseLost) as error:
                budget.unreachable()
                await budget.pause(str(error))
                continue
            if response.status == 200:
                return session, response.body
            await self._refused(episode, session, response, budget)

    # Sessions

    async def _session(self, episode: _RemoteEpisode, budget: RetryBudget) -> _RemoteSession:
        """The episode's session, opened if need be; `EpisodeLost` once its state is gone."""
        episode.state.check()
        if episode.session is None:
            async with episode.lock:
                if episode.session is None:
                    episode.session = await self._open_session(episode.context, budget)
        return episode.session

    async def _open_session(self, context: ToolContext, budget: RetryBudget) -> _RemoteSession:
        """A new session on the episode's own server, or on the next one that takes it."""
        addresses = in_order(self._addresses, context.episode)
        ids = {address: secrets.token_hex(12) for address in addresses}
        body = {"episode": context.episode, "task": task_to_json(context.task), "tools": self._wanted}
        given_up: dict[str, str] = {}  # sessions that may exist, by address
        try:
            while True:
                problem, wait = "", 0.0
                for address in addresses:
                    data = dump({**body, "session": ids[address]})
                    given_up[address] = f"{address}/v1/sessions/{ids[address]}"
                    try:
                        response = await self._send(
                            "POST", f"{address}/v1/sessions", data, budget, _OPEN_SECONDS
                        )
                    except NotConnected as error:
                        given_up.pop(address)  # whatever it held is gone with it
                        problem = str(error)
                        continue
                    except ResponseLost as error:
                        problem = str(error)
                        continue
                    if response.status in (200, 201):
                        session = _RemoteSession(ids[address], address, response.instance)
                        session.learn(response.body)
                        given_up.pop(address)
                        return session
                    refusal = error_of(response)
                    if refusal.kind not in _NOT_TAKEN:
                        raise failure_of(refusal, budget.attempts, address)
                    self.counters.refused += 1
                    problem, wait = refusal.message, max(wait, retry_after(refusal.retry_after))
                if not wait:
                    budget.unreachable()
                await budget.pause(problem, wait)
        finally:
            for url in given_up.values():  # it would hold, or wait for, what others need
                self._delete_in_background(url)

    def _drop_session(self, episode: _RemoteEpisode, session: _RemoteSession) -> None:
        """The next call opens another one."""
        if episode.session is session:
            episode.session = None
            self.counters.reopened += 1

    async def _refused(
        self,
        episode: _RemoteEpisode,
        session: _RemoteSession,
        response: ServerResponse,
        budget: RetryBudget,
    ) -> None:
        """An answer without a result: pause and return to try again, or raise what it means."""
        error = error_of(response)
        if error.kind in _NOT_TAKEN:
            self.counters.refused += 1
            if error.kind is ErrorKind.DRAINING and len(self._addresses) > 1 and not session.has_state:
                self._drop_session(episode, session)
            await budget.pause(error.message, retry_after(error.retry_after))
        elif error.kind in _SESSION_GONE:
            if session.has_state:
                self.counters.lost += not episode.state.lost
                episode.state.lose(error.message)
            episode.state.check(attempts=budget.attempts)
            self._drop_session(episode, session)
            await budget.pause(error.message)
        else:
            raise failure_of(error, budget.attempts, session.address)

    # Calls

    async def _result(self, episode: _RemoteEpisode, call: _PendingCall) -> ToolResult:
        """Send one call until it has a result, or until its failure is certain."""
        budget, is_first = call.budget, True
        while True:
            session = await self._session(episode, budget)
            facts = session.tools.get(call.name, UNKNOWN)
            self.counters.retries += not is_first
            is_first, began = False, time.monotonic()
            try:
                response = await self._send_call(session, call)
            except NotConnected as error:
                may_repeat = call.unanswered is None or facts.repeatable
                if len(self._addresses) > 1 and not session.has_state and may_repeat:
                    self._drop_session(episode, session)  # another server, where nothing is lost by it
                    if call.unanswered is not None:
                        self._count_repeat(call)
                await self._unreachable(session, call, error)
                continue
            except ResponseLost as error:
                session.has_state = session.has_state or facts.stateful
                call.unanswered = call.unanswered or (session.instance, began)
                await self._unreachable(session, call, error)
                continue
            session.is_fresh = False
            if response.status == 200:
                result = result_of(response)
                session.has_state |= facts.stateful and result.fault is not Fault.UNKNOWN_TOOL
                return result
            refusal = error_of(response)
            if refusal.kind is ErrorKind.TOO_LARGE:
                return ToolResult(f"{call.name}: the arguments are too large", fault=Fault.BAD_ARGUMENTS)
            session.has_state = session.has_state or (facts.stateful and refusal.started)
            if refusal.kind in _SESSION_GONE and call.unanswered is not None and not session.has_state:
                self._check_repeat(session, call)
            await self._refused(episode, session, response, budget)

    async def _send_call(self, session: _RemoteSession, call: _PendingCall) -> ServerResponse:
        if call.unanswered is not None:
            instance, began = call.unanswered
            call.body["retry"] = {"instance": instance, "age_ms": (time.monotonic() - began) * 1000}
        url, data = f"{session.url}/calls", dump(call.body)
        try:
            return await self._send("POST", url, data, call.budget)
        except (InfraError, asyncio.CancelledError):
            self._cancel_in_background(session, call)
            raise

    async def _unreachable(self, session: _RemoteSession, call: _PendingCall, error: Exception) -> None:
        """Pause, or give up; and then it matters whether the call may have run."""
        call.budget.unreachable()
        if call.budget.is_spent and call.unanswered is not None:
            self._check_repeat(session, call)
        await call.budget.pause(str(error))

    def _check_repeat(self, session: _RemoteSession, call: _PendingCall) -> None:
        repeatable = session.tools.get(call.name, UNKNOWN).repeatable
        why, attempts = "the server went away", call.budget.attempts
        check_repeatable(call.name, repeatable, why, attempts=attempts)
        self._count_repeat(call)

    def _count_repeat(self, call: _PendingCall) -> None:
        self.counters.repeated += 1
        _log.warning("%r may have run on a server process that is gone; it is repeated", call.name)

    def _cancel_in_background(self, session: _RemoteSession, call: _PendingCall) -> None:
        """Tell the server to end a call that may still run there, and has no caller any more."""
        self._delete_in_background(f"{session.url}/calls/{call.body['key']}")

    def _delete_in_background(self, url: str) -> None:
        task = asyncio.get_running_loop().create_task(self._delete(url))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _delete(self, url: str) -> None:
        try:
            await self._http.attempt("DELETE", url, None, _CLOSE_SECONDS)
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
