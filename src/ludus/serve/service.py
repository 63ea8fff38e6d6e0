"""The tool server without its HTTP: sessions, calls, admission, and what happens once only.

Who waits for whom. Each call that is taken runs in a task of its own, in the journal; requests wait for that
task, and several may wait for the same one. A request that goes away takes nothing with it, except that a call
for which nobody waits is cancelled after `orphan_seconds`. Admission bounds the tasks: a call has a ticket
before it has a task.
"""

from __future__ import annotations

import asyncio
import secrets

from ludus.core.failures import InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, slot_release
from ludus.core.task import Task
from ludus.serve.admission import Admission, Share, Ticket
from ludus.serve.journal import Entry, Journal, Outcome
from ludus.serve.logs import log_call
from ludus.serve.metrics import Metrics
from ludus.serve.problems import Problem
from ludus.serve.sessions import OPENING, Session, Sessions
from ludus.serve.settings import ServerConfig
from ludus.tools import unknown_tool
from ludus.tools.hosting import ToolFacts, ToolHost
from ludus.tools.wire import CallBody, ErrorKind

_DRAIN_PAUSE = 1.0


class ToolService:
    """A started host behind admission, a journal and sessions."""

    def __init__(self, host: ToolHost, facts: dict[str, ToolFacts], config: ServerConfig) -> None:
        self.instance = secrets.token_hex(8)
        self.host, self.facts, self._config = host, facts, config
        limits = {
            name: config.tool_concurrency.get(name, one.concurrency) for name, one in facts.items()
        }
        self.admission = Admission(
            config.concurrency, config.queue, {**limits, OPENING: None}, config.tool_queue
        )
        self.journal = Journal(config.keep_seconds, config.keep_calls, config.keep_bytes)
        self.metrics = Metrics()
        self.sessions = Sessions(
            host, self.admission, self.metrics, config.max_sessions, config.idle_seconds
        )
        self.draining = False
        self._watch()

    async def call(
        self, session: Session | None, call: CallBody, deadline: float | None, share: Share
    ) -> Outcome:
        """Run the call, or join the one with the same key; the outcome may be a `Problem`.

        `share` is what its body takes, which a call that goes on without its request still holds.
        """
        scope = "" if session is None else session.id
        try:
            entry = self.journal.find(scope, call)
            if entry is None:
                entry = self._begin(session, call, deadline)
                assert entry.task is not None
                share.hold()
                entry.task.add_done_callback(lambda _: share.release())
            else:
                self.metrics.joined.inc()
        except Problem as problem:
            self.metrics.refused.labels(problem.kind.value).inc()
            log_call(scope, call.name, problem, 0.0, 0.0)
            return problem
        await self._wait(entry)
        assert entry.outcome is not None
        log_call(scope, call.name, entry.outcome, entry.queue_seconds, entry.seconds)
        return entry.outcome

    def cancel(self, session: str, key: str) -> bool:
        """Stop a running call; whether there was one."""
        entry = self.journal.running_under((session, key))
        if entry is None or entry.task is None:
            return False
        self.metrics.cancelled.labels("asked").inc()
        entry.task.cancel()
        return True

    def refuse_when_draining(self) -> None:
        if self.draining:
            message = "the server is stopping and takes nothing new"
            raise Problem(ErrorKind.DRAINING, message, retry_after=_DRAIN_PAUSE)

    async def drain(self) -> None:
        """Take nothing new, let what runs finish within the grace, and close all sessions."""
        self.draining = True
        running = [entry.task for entry in self.journal.running if entry.task is not None]
        if running:
            await asyncio.wait(running, timeout=self._config.drain_seconds)
        left = [entry.task for entry in self.journal.running if entry.task is not None]
        for task in left:
            self.metrics.cancelled.labels("drain").inc()
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=5.0)
        await self.sessions.close_all("drain")

    def _begin(self, session: Session | None, call: CallBody, deadline: float | None) -> Entry:
        self.refuse_when_draining()
        self._check_retry(call)
        ticket = self.admission.enter(call.name, deadline)
        scope = "" if session is None else session.id

        async def work(entry: Entry) -> tuple[Outcome, bool]:
            return await self._perform(entry, ticket, session, call, deadline)

        entry = self.journal.start(scope, call, work)
        if session is not None:
            session.calls.add(entry)
        assert entry.task is not None
        entry.task.add_done_callback(lambda _: self._ended(entry, ticket, session, call.name))
        return entry

    def _check_retry(self, call: CallBody) -> None:
        """Refuse a retry that may be a second run, unless the tool allows that."""
        if call.retry is None:
            return
        elsewhere = call.retry.instance != self.instance
        if not elsewhere and not self.journal.may_have_forgotten(call.retry.age_ms / 1000):
            return  # it was sent to us, and we would remember it: it never arrived
        facts = self.facts.get(call.name)
        if facts is not None and facts.repeatable:
            self.metrics.repeated.labels(self._label(call.name)).inc()
            return
        where = "to another server process" if elsewhere else "too long ago to be remembered"
        raise Problem(
            ErrorKind.UNKNOWN_OUTCOME,
            f"an earlier attempt was sent {where}; whether it took effect is unknown, and the tool "
            f"{call.name!r} may not be repeated (retries=0)",
            started=True,
        )

    async def _perform(
        self,
        entry: Entry,
        ticket: Ticket,
        session: Session | None,
        call: CallBody,
        deadline: float | None,
    ) -> tuple[Outcome, bool]:
        """The outcome, and whether it must be remembered: everything that may have run must."""
        try:
            await ticket.granted()
        except Problem as problem:
            return problem, False
        try:
            slot_release.set(ticket.yielded)
            async with asyncio.timeout_at(deadline) as limit:
                return await self._run(session, call), True
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the deadline passed while {call.name!r} ran; it was cancelled"
            return Problem(ErrorKind.EXPIRED, message, started=True), True
        except asyncio.CancelledError:
            message = f"{call.name!r} was cancelled while it ran"
            return Problem(ErrorKind.CANCELLED, message, started=True), True
        except InfraError as error:
            return Problem.of(error), True

    async def _run(self, session: Session | None, call: CallBody) -> ToolResult:
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

    def _ended(self, entry: Entry, ticket: Ticket, session: Session | None, tool: str) -> None:
        now = asyncio.get_running_loop().time()
        entry.queue_seconds = ticket.queue_seconds
        entry.seconds = max(0.0, now - ticket.arrived - entry.queue_seconds)
        started = ticket.started is not None
        ticket.leave()
        if session is not None:
            session.calls.discard(entry)
            session.used = now
        label = self._label(tool)
        self.metrics.calls.labels(label, _named(entry.outcome)).inc()
        self.metrics.queue_seconds.labels(label).observe(entry.queue_seconds)
        if started:
            self.metrics.seconds.labels(label).observe(entry.seconds)

    async def _wait(self, entry: Entry) -> None:
        if entry.done is None:
            return
        entry.waiters += 1
        try:
            await entry.done.wait()
        finally:
            entry.waiters -= 1
            if entry.waiters == 0 and entry.outcome is None:
                loop = asyncio.get_running_loop()
                loop.call_later(self._config.orphan_seconds, self._cancel_orphan, entry)

    def _cancel_orphan(self, entry: Entry) -> None:
        if entry.waiters == 0 and entry.task is not None and entry.outcome is None:
            self.metrics.cancelled.labels("orphan").inc()
            entry.task.cancel()

    def _label(self, tool: str) -> str:
        """Labels are for tools there are: what clients make up must not fill the memory."""
        return tool if tool in self.facts else "(unknown)"

    def _watch(self) -> None:
        watch, health = self.metrics.watch, self.host.health
        watch("running", "Calls that run now.", lambda: self.admission.running)
        watch("waiting", "Calls that wait now.", lambda: self.admission.waiting)
        watch("sessions", "Sessions that are open now.", lambda: len(self.sessions))
        watch("remembered", "Finished calls that are remembered.", lambda: len(self.journal))
        watch("workers_alive", "Workers that can take calls.", lambda: health().alive)
        watch("workers_restarted", "Workers replaced since the start.", lambda: health().restarted)


def _named(outcome: Outcome | None) -> str:
    if isinstance(outcome, ToolResult):
        return "ok" if outcome.fault is None else outcome.fault.value
    return "lost" if outcome is None else outcome.kind.value
