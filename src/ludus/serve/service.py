"""The tool server without HTTP: its settings, idempotent calls, and the service that ties them together.

Who waits for whom. Each admitted call runs in its own task, registered in the idempotency cache; requests wait
for that task, and several may wait for the same one. A request that disconnects cancels nothing, except that a
call without waiting requests is cancelled after `orphan_seconds`. Admission bounds the tasks: a call has a
ticket before it has a task.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sys
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from ludus.core.config import Config
from ludus.core.failures import ConfigError, InfraError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, slot_release
from ludus.core.task import Task
from ludus.core.user_code import error_with_location
from ludus.serve.admission import Admission, ByteShare, RequestError, Ticket
from ludus.serve.sessions import OPENING, ServerSession, ServerSessions
from ludus.serve.telemetry import CallOutcome, Metrics, log_call, outcome_name
from ludus.tools import unknown_tool
from ludus.tools.hosting import ToolFacts, ToolHost
from ludus.tools.hosting.host import UNKNOWN
from ludus.tools.wire import CallBody, ErrorKind, dump


class ServerConfig(Config):
    """Limits of a tool server. Every queue, buffer and wait in it has its limit here."""

    host: str = "127.0.0.1"
    """The address to listen on; one that others can reach needs a token."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one, which is printed."""
    concurrency: int = Field(default=256, ge=1)
    """Calls that run at once."""
    queue: int = Field(default=4096, ge=0)
    """Calls that wait; one more is refused at once."""
    tool_concurrency: dict[str, int] = Field(default_factory=dict)
    """Calls that run at once, by tool; the tool's own `max_concurrency` where it is not named here."""
    tool_queue: int | None = Field(default=None, ge=0)
    """Calls that wait for any one tool; as many as wait at all when left out."""
    max_sessions: int = Field(default=16_384, ge=1)
    """Sessions that are open at once."""
    idle_seconds: float = Field(default=1800.0, gt=0)
    """Seconds without use after which a session is closed."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running calls may take to finish once the server stops."""
    orphan_seconds: float = Field(default=5.0, ge=0)
    """How long a call goes on after its caller's connection broke, in case the caller asks again."""
    max_body_bytes: int = Field(default=8_000_000, ge=1024)
    """The largest request."""
    held_bytes: int = Field(default=32_000_000, ge=1024)
    """Bytes of large requests that are held at once, as they arrive; one request may go beyond."""
    client_seconds: float = Field(default=30.0, gt=0)
    """How long a client may take to send a request, or to take a piece of an answer."""
    keepalive_seconds: float = Field(default=75.0, gt=0)
    """How long a connection may say nothing."""
    stream_chars: int = Field(default=262_144, ge=1)
    """Results longer than this are streamed to clients that can read a stream."""
    keep_seconds: float = Field(default=600.0, gt=0)
    """How long finished calls are remembered, so that a repeated request gets the same answer."""
    keep_calls: int = Field(default=20_000, ge=0)
    """How many of them."""
    keep_bytes: int = Field(default=64_000_000, ge=0)
    """How much memory their results may take."""


_log = logging.getLogger(__name__)

_DRAIN_PAUSE = 1.0
ASKING = "(ask)"
"""The admission queue for questions to environments, beside those of the tools."""
_TRANSIT_SECONDS = 30.0
"""How long a retry may be in transit, during which its age is not counted."""

Name = tuple[str, str]
"""Session id, or an empty string, and idempotency key."""


@dataclass(slots=True, eq=False)
class CallRecord:
    """One call: running, or finished with its outcome."""

    name: Name
    fingerprint: bytes
    arrived: float
    task: asyncio.Task[tuple[CallOutcome, bool]] | None = None
    outcome: CallOutcome | None = None
    waiters: int = 0
    size: int = 0
    finished: float = 0.0
    done: asyncio.Event | None = field(default_factory=asyncio.Event)
    """Set when it is finished; then dropped, because many finished calls are kept."""
    queue_seconds: float = 0.0
    seconds: float = 0.0


class IdempotencyCache:
    """Running and finished calls by idempotency key, so that a request that comes twice runs once.

    A request whose key is known joins the running call, or gets the finished one's answer. Finished calls are
    dropped by age, count and size. That must not turn a late retry into a second run, so the cache remembers
    the arrival of the youngest call it ever dropped: a retry whose first attempt is older may have run, a
    younger one cannot have.
    """

    def __init__(self, keep_seconds: float, keep_calls: int, keep_bytes: int) -> None:
        self._keep_seconds, self._keep_calls, self._keep_bytes = keep_seconds, keep_calls, keep_bytes
        self.running: dict[Name, CallRecord] = {}
        self._finished: OrderedDict[Name, CallRecord] = OrderedDict()
        self._size = 0
        self._forgotten_until = float("-inf")

    @property
    def tasks(self) -> list[asyncio.Task[tuple[CallOutcome, bool]]]:
        return [entry.task for entry in self.running.values() if entry.task is not None]

    def __len__(self) -> int:
        return len(self._finished)

    def find(self, session: str, call: CallBody) -> CallRecord | None:
        """The call with this key, if any; a `RequestError` when that key stood for something else."""
        oldest = _now() - self._keep_seconds
        while self._finished and next(iter(self._finished.values())).finished < oldest:
            self._forget_first()
        name = (session, call.key)
        entry = self.running.get(name) or self._finished.get(name)
        if entry is not None and entry.fingerprint != fingerprint(call):
            message = f"the key {call.key!r} was used for a different call; a key is for one call only"
            raise RequestError(ErrorKind.KEY_REUSED, message)
        return entry

    def may_have_forgotten(self, age_seconds: float) -> bool:
        """Whether a call that arrived so long ago, or later, could have run and been dropped."""
        return _now() - age_seconds - _TRANSIT_SECONDS <= self._forgotten_until

    def start(
        self, session: str, call: CallBody, work: Coroutine[Any, Any, tuple[CallOutcome, bool]]
    ) -> CallRecord:
        """Run `work` under this key. It returns the outcome, and whether that must be kept."""
        entry = CallRecord((session, call.key), fingerprint(call), _now())
        self.running[entry.name] = entry
        entry.task = asyncio.create_task(work)
        # By callback: a task that is cancelled before its first step runs none of its own code.
        entry.task.add_done_callback(lambda task: self._finish(entry, task))
        return entry

    def _finish(self, entry: CallRecord, task: asyncio.Task[tuple[CallOutcome, bool]]) -> None:
        keep = False
        if task.cancelled():
            entry.outcome = RequestError(ErrorKind.CANCELLED, "the call was cancelled before it was run")
        elif (error := task.exception()) is not None:
            _log.error("unexpected error in a call", exc_info=error)
            message = f"{type(error).__name__}: {error}"
            entry.outcome, keep = RequestError(ErrorKind.FAILED, message, started=True), True
        else:
            entry.outcome, keep = task.result()
        del self.running[entry.name]
        entry.finished = _now()
        if keep:
            self._remember(entry)
        assert entry.done is not None
        entry.done.set()
        entry.done = entry.task = None

    def _remember(self, entry: CallRecord) -> None:
        outcome, entry.size = entry.outcome, 256
        if isinstance(outcome, ToolResult):
            entry.size += sys.getsizeof(outcome.content)  # in memory: up to four bytes a character
            entry.size += sum(len(media.data or b"") for media in outcome.media)
        self._finished[entry.name] = entry
        self._size += entry.size
        while self._finished and (
            len(self._finished) > self._keep_calls or self._size > self._keep_bytes
        ):
            self._forget_first()

    def _forget_first(self) -> None:
        _, entry = self._finished.popitem(last=False)
        self._size -= entry.size
        self._forgotten_until = max(self._forgotten_until, entry.arrived)


def fingerprint(call: CallBody) -> bytes:
    """Fingerprint of a call: equal for two requests of the same call."""
    return hashlib.blake2b(dump([call.name, call.arguments, call.id]), digest_size=16).digest()


def _now() -> float:
    return asyncio.get_running_loop().time()


class ToolService:
    """A started tool host behind admission control, the idempotency cache and sessions."""

    def __init__(self, host: ToolHost, facts: dict[str, ToolFacts], config: ServerConfig) -> None:
        self.instance = secrets.token_hex(8)
        self.host, self.facts, self._config = host, facts, config
        limits = {
            name: config.tool_concurrency.get(name, one.concurrency) for name, one in facts.items()
        }
        # sessions may wait for environments that others hold, whose calls need slots to finish
        limits[OPENING] = max(1, config.concurrency // 2)
        self.admission = Admission(config.concurrency, config.queue, limits, config.tool_queue)
        self.idempotency = IdempotencyCache(config.keep_seconds, config.keep_calls, config.keep_bytes)
        self.metrics = Metrics()
        self.sessions = ServerSessions(
            host, self.admission, self.metrics, config.max_sessions, config.idle_seconds
        )
        self.draining = False
        watch, health = self.metrics.watch, host.health
        watch("running", "Calls that run now.", lambda: self.admission.running)
        watch("waiting", "Calls that wait now.", lambda: self.admission.waiting)
        watch("sessions", "Sessions that are open now.", lambda: len(self.sessions))
        watch("remembered", "Finished calls that are remembered.", lambda: len(self.idempotency))
        watch("workers_alive", "Workers that can take calls.", lambda: health().alive)
        watch("workers_restarted", "Workers replaced since the start.", lambda: health().restarted)

    async def call(
        self, session: ServerSession | None, call: CallBody, deadline: float | None, share: ByteShare
    ) -> CallOutcome:
        """Run the call, or join the one with the same key; the outcome may be a `RequestError`.

        `share`: the memory of its body, which a call that continues without its request still holds.
        """
        scope = "" if session is None else session.id
        try:
            entry = self.idempotency.find(scope, call)
            if entry is None:
                entry = self._begin(session, call, deadline)
                assert entry.task is not None
                share.hold()
                entry.task.add_done_callback(lambda _: share.release())
            else:
                self.metrics.joined.inc()
        except RequestError as error:
            self.metrics.refused.labels(error.kind.value).inc()
            log_call(scope, call.name, error, 0.0, 0.0)
            return error
        if entry.done is not None:
            entry.waiters += 1
            try:
                await entry.done.wait()
            finally:
                entry.waiters -= 1
                if entry.waiters == 0 and entry.outcome is None:
                    loop = asyncio.get_running_loop()
                    loop.call_later(self._config.orphan_seconds, self._cancel_orphan, entry)
        assert entry.outcome is not None
        log_call(scope, call.name, entry.outcome, entry.queue_seconds, entry.seconds)
        return entry.outcome

    async def ask(
        self, what: str, session: ServerSession | None, body: Json, deadline: float | None
    ) -> Json:
        """Ask the session's environments (see `ToolHost.ask`); a `RequestError` says why there is no answer."""
        ticket = self.admission.enter(ASKING, deadline)
        task = asyncio.create_task(self._answer(what, session, body, ticket, deadline))
        task.add_done_callback(lambda _: ticket.leave())
        if session is not None:
            session.calls.add(task)
            task.add_done_callback(session.calls.discard)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()  # matters only if the client disconnected
            if session is not None:
                session.used = _now()
        if task.cancelled():
            raise RequestError(ErrorKind.CANCELLED, f"{what!r} was cancelled", started=True)
        return task.result()

    async def _answer(
        self,
        what: str,
        session: ServerSession | None,
        body: Json,
        ticket: Ticket,
        deadline: float | None,
    ) -> Json:
        await ticket.granted()
        try:
            async with asyncio.timeout_at(deadline):
                return await self.host.ask(what, None if session is None else session.context, body)
        except TimeoutError:
            message = f"the deadline passed before {what!r} was answered"
            raise RequestError(ErrorKind.EXPIRED, message, started=True) from None
        except ConfigError as error:
            raise RequestError(ErrorKind.BAD_TASK, str(error)) from error
        except InfraError as error:
            raise RequestError.of(error) from error
        except (RequestError, asyncio.CancelledError):
            raise
        except Exception as error:
            message = f"{what!r} failed: {error_with_location(error)}"
            raise RequestError(ErrorKind.FAILED, message, started=True) from error

    def cancel(self, session: str, key: str) -> bool:
        """Cancel a running call; returns whether there was one."""
        entry = self.idempotency.running.get((session, key))
        if entry is None or entry.task is None:
            return False
        self.metrics.cancelled.labels("asked").inc()
        entry.task.cancel()
        return True

    def refuse_when_draining(self) -> None:
        if self.draining:
            message = "the server is stopping and takes nothing new"
            raise RequestError(ErrorKind.DRAINING, message, retry_after=_DRAIN_PAUSE)

    async def drain(self) -> None:
        """Refuse new calls, let running ones finish within `drain_seconds`, and close all sessions."""
        self.draining = True
        if running := self.idempotency.tasks:
            await asyncio.wait(running, timeout=self._config.drain_seconds)
        left = self.idempotency.tasks
        for task in left:
            self.metrics.cancelled.labels("drain").inc()
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=5.0)
        await self.sessions.close_all("drain")

    def _begin(
        self, session: ServerSession | None, call: CallBody, deadline: float | None
    ) -> CallRecord:
        self.refuse_when_draining()
        self._check_retry(call)
        ticket = self.admission.enter(call.name, deadline)
        scope = "" if session is None else session.id
        entry = self.idempotency.start(scope, call, self._perform(ticket, session, call, deadline))
        assert entry.task is not None
        if session is not None:
            session.calls.add(entry.task)
            entry.task.add_done_callback(session.calls.discard)
        entry.task.add_done_callback(lambda _: self._ended(entry, ticket, session, call.name))
        return entry

    def _check_retry(self, call: CallBody) -> None:
        """Refuse a retry that may be a second run, unless the tool allows that."""
        if call.retry is None:
            return
        elsewhere = call.retry.instance != self.instance
        if not elsewhere and not self.idempotency.may_have_forgotten(call.retry.age_ms / 1000):
            return  # it was sent here and would be known: it never arrived
        if self.facts.get(call.name, UNKNOWN).repeatable:
            self.metrics.repeated.labels(self._label(call.name)).inc()
            return
        where = "to another server process" if elsewhere else "too long ago to be remembered"
        raise RequestError(
            ErrorKind.UNKNOWN_OUTCOME,
            f"an earlier attempt was sent {where}; whether it took effect is unknown, and the tool "
            f"{call.name!r} may not be repeated (retries=0)",
            started=True,
        )

    async def _perform(
        self, ticket: Ticket, session: ServerSession | None, call: CallBody, deadline: float | None
    ) -> tuple[CallOutcome, bool]:
        """The outcome, and whether it must be kept: everything that may have run must."""
        try:
            await ticket.granted()
        except RequestError as error:
            return error, False
        try:
            slot_release.set(ticket.yielded)
            async with asyncio.timeout_at(deadline) as limit:
                return await self._run(session, call), True
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the deadline passed while {call.name!r} ran; it was cancelled"
            return RequestError(ErrorKind.EXPIRED, message, started=True), True
        except asyncio.CancelledError:
            message = f"{call.name!r} was cancelled while it ran"
            return RequestError(ErrorKind.CANCELLED, message, started=True), True
        except InfraError as error:
            return RequestError.of(error), True

    async def _run(self, session: ServerSession | None, call: CallBody) -> ToolResult:
        tool_call = ToolCall(call.name, call.arguments, call.id)
        if session is not None:
            if not session.wants(call.name):
                return unknown_tool(call.name, session.wanted or ())
            return await self.host.call(tool_call, session.context)
        context = ToolContext(f"call-{secrets.token_hex(8)}", Task("", ()), one_call=True)
        await self.host.open(context)
        try:
            return await self.host.call(tool_call, context)
        finally:
            await self.host.close(context)

    def _ended(
        self, entry: CallRecord, ticket: Ticket, session: ServerSession | None, tool: str
    ) -> None:
        now, entry.queue_seconds = _now(), ticket.queue_seconds
        entry.seconds = max(0.0, now - ticket.arrived - entry.queue_seconds)
        started = ticket.started is not None
        ticket.leave()
        if session is not None:
            session.used = now
        label = self._label(tool)
        self.metrics.calls.labels(label, outcome_name(entry.outcome)).inc()
        self.metrics.queue_seconds.labels(label).observe(entry.queue_seconds)
        if started:
            self.metrics.seconds.labels(label).observe(entry.seconds)

    def _cancel_orphan(self, entry: CallRecord) -> None:
        if entry.waiters == 0 and entry.task is not None and entry.outcome is None:
            self.metrics.cancelled.labels("orphan").inc()
            entry.task.cancel()

    def _label(self, tool: str) -> str:
        """Metric labels are for existing tools only: clients must not be able to create any number of them."""
        return tool if tool in self.facts else "(unknown)"
