"""Admission control: which call runs now, which one waits, and which request is refused.

Who waits for whom. Asking for a ticket never waits: it is refused at once when the queue is full. A granted
ticket holds one of `concurrency` slots, and one of its tool's. Waiting tickets stand in one queue per tool; a
free slot goes to the ticket that has waited longest among the tools that may run one more call. So a slow tool
fills its own queue and delays no other. A ticket whose deadline passes while it waits is removed by a timer,
and never runs.

A call that waits for what other calls hold (capacity in the sandbox, its turn in a session) yields its slot
meanwhile, and takes one again at once when it continues: otherwise such calls could fill all slots, and the
calls they wait for could not run. It counts as waiting.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ludus.core.failures import InfraError, LudusError
from ludus.core.messages import Json
from ludus.remote.threads import ThreadExecutor
from ludus.tools.wire import ErrorBody, ErrorKind, error_kind, failure_fields

T = TypeVar("T")

SMALL = 65_536
"""Bytes of a request that are neither counted nor worth a thread."""
_SMOOTHING = 0.05
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 30.0


class RequestError(LudusError):
    """Why a request has no result, as an error response. `started` says whether the tool may have run."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        started: bool = False,
        retry_after: float | None = None,
        failure: Json | None = None,
    ) -> None:
        """`failure`: what else an infrastructure failure says, see `failure_fields`."""
        super().__init__(message)
        self.kind, self.started, self.retry_after = kind, started, retry_after
        self._failure = failure or {}

    @classmethod
    def of(cls, error: InfraError) -> RequestError:
        """From an infrastructure failure that a host or a tool raised."""
        return cls(error_kind(error), str(error), started=True, failure=failure_fields(error))

    def body(self) -> Json:
        """As JSON."""
        wait, failure = self.retry_after, self._failure
        body = ErrorBody(
            kind=self.kind, message=str(self), started=self.started, retry_after=wait, **failure
        )
        return body.model_dump(mode="json")


@dataclass(slots=True)
class _Lane:
    """The running and waiting calls of one tool."""

    limit: int | None
    running: int = 0
    waiting: deque[Ticket] = field(default_factory=deque)

    @property
    def has_room(self) -> bool:
        return self.limit is None or self.running < self.limit


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in the queue, then a slot. Await `granted`; `leave` releases what it holds."""

    admission: Admission
    lane: _Lane
    number: int
    arrived: float
    turn: asyncio.Future[None] | None = None
    timer: asyncio.TimerHandle | None = None
    started: float | None = None

    @property
    def queue_seconds(self) -> float:
        now = asyncio.get_running_loop().time() if self.started is None else self.started
        return now - self.arrived

    async def granted(self) -> None:
        """Wait for a slot; a `RequestError` of kind expired when the deadline passes first."""
        if self.turn is not None:
            await self.turn

    @contextmanager
    def yielded(self) -> Iterator[None]:
        """Yield the slot to other calls for the length of a block."""
        self.admission._yield(self, 1)
        try:
            yield
        finally:
            self.admission._yield(self, -1)

    def leave(self) -> None:
        """Release the slot, or the place in the queue. Idempotent."""
        self.admission._leave(self)


class Admission:
    """Bounded queues in front of bounded concurrency."""

    def __init__(
        self,
        concurrency: int,
        queue: int,
        tool_concurrency: Mapping[str, int | None],
        tool_queue: int | None = None,
    ) -> None:
        """`tool_concurrency` names the tools that have their own queue; all others share one."""
        self._concurrency, self._queue = concurrency, queue
        self._tool_queue = queue if tool_queue is None else tool_queue
        self._lanes = {name: _Lane(limit) for name, limit in tool_concurrency.items()}
        self._other = _Lane(None)
        self._numbers = itertools.count()
        self._service_seconds = 0.1
        self.running = 0
        self.waiting = 0
        """Tickets in queues, and calls that have yielded their slot."""
        self.yielded = 0
        """Calls that have yielded their slot."""

    def enter(self, tool: str, deadline: float | None = None) -> Ticket:
        """A ticket, granted or waiting; a `RequestError` when there is no room or no time. Never waits.

        `deadline` is in the event loop's time.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        if deadline is not None and deadline <= now:
            raise _expired()
        lane = self._lanes.get(tool, self._other)
        ticket = Ticket(self, lane, next(self._numbers), now)
        if self.running < self._concurrency and lane.has_room and not lane.waiting:
            self._start(ticket, now)
            return ticket
        if self.waiting >= self._queue or len(lane.waiting) >= self._tool_queue:
            raise self._overloaded(lane)
        ticket.turn = loop.create_future()
        if deadline is not None:
            ticket.timer = loop.call_at(deadline, self._expire, ticket)
        lane.waiting.append(ticket)
        self.waiting += 1
        return ticket

    def _start(self, ticket: Ticket, now: float) -> None:
        ticket.started = now
        ticket.lane.running += 1
        self.running += 1

    def _expire(self, ticket: Ticket) -> None:
        if ticket.started is None and ticket.turn is not None and not ticket.turn.done():
            self._forget(ticket)
            ticket.turn.set_exception(_expired())

    def _forget(self, ticket: Ticket) -> None:
        ticket.lane.waiting.remove(ticket)
        self.waiting -= 1

    def _leave(self, ticket: Ticket) -> None:
        if ticket.timer is not None:
            ticket.timer.cancel()
        if ticket.started is None:
            if ticket in ticket.lane.waiting:
                self._forget(ticket)
            return
        now = asyncio.get_running_loop().time()
        if math.isfinite(ticket.started):
            spent = now - ticket.started
            self._service_seconds += _SMOOTHING * (spent - self._service_seconds)
            ticket.started = math.inf  # released
            ticket.lane.running -= 1
            self.running -= 1
            self._call_next(now)

    def _yield(self, ticket: Ticket, count: int) -> None:
        ticket.lane.running -= count
        self.running -= count
        self.yielded += count
        self.waiting += count
        if count > 0:
            self._call_next(asyncio.get_running_loop().time())

    def _call_next(self, now: float) -> None:
        while self.waiting > self.yielded and self.running < self._concurrency:
            lanes = (*self._lanes.values(), self._other)
            ready = [lane.waiting[0] for lane in lanes if lane.waiting and lane.has_room]
            if not ready:
                return
            ticket = min(ready, key=lambda one: one.number)
            self._forget(ticket)
            self._start(ticket, now)
            if ticket.timer is not None:
                ticket.timer.cancel()
            assert ticket.turn is not None
            if not ticket.turn.done():
                ticket.turn.set_result(None)
            # A ticket that was cancelled meanwhile releases the slot itself, in `leave`.

    def _overloaded(self, lane: _Lane) -> RequestError:
        """Retry-After: when about half of the waiting calls will have run, by their recent duration."""
        slots = min(self._concurrency, lane.limit or self._concurrency)
        ahead = len(lane.waiting) if lane.limit is not None else self.waiting
        pause = self._service_seconds * (1 + ahead / 2) / slots
        pause = min(max(pause, _SHORTEST_PAUSE), _LONGEST_PAUSE)
        message = f"{self.waiting} calls wait already; this one was not taken"
        return RequestError(ErrorKind.OVERLOADED, message, retry_after=round(pause, 3))


class Running:
    """Enter this for requests that a server that stops waits for."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()

    def __enter__(self) -> None:
        self.count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()

    async def ended(self, seconds: float) -> None:
        """Wait until there are none, for so many seconds at most."""
        if self.count:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)


class ByteBudget:
    """Bounds the bytes of request bodies in memory, counted as they arrive.

    A body takes several times its length while it is parsed and run, so no more of it is read than the budget
    allows. Announcing a large body reserves nothing. Small bodies do not count and never wait: the queue bounds
    them. Freed bytes go to the oldest request that waits. One request at a time may exceed the budget:
    otherwise several, all read in part, could wait for each other (deadlock).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, ByteShare, int, asyncio.Future[None]]] = []
        self._beyond: ByteShare | None = None

    def share(self) -> ByteShare:
        """For a new request, of which nothing has been read."""
        return ByteShare(self, next(self._numbers))

    def _fits(self, share: ByteShare, size: int) -> bool:
        if self.held + size <= self._most:
            return True
        if self._beyond is None:
            self._beyond = share
        return self._beyond is share

    def _serve(self) -> None:
        while self._waiting:
            _, share, size, turn = self._waiting[0]
            if not self._fits(share, size):
                return
            heapq.heappop(self._waiting)
            self._take(share, size)
            turn.set_result(None)

    def _take(self, share: ByteShare, size: int) -> None:
        share.size += size
        self.held += size


class ByteShare:
    """One request's part of the budget, released when neither request nor call needs the body any more."""

    def __init__(self, bytes: ByteBudget, number: int) -> None:
        self._bytes, self._number, self._users = bytes, number, 1
        self.size = 0

    async def grow(self, size: int, seconds: float) -> None:
        """Room for `size` bytes in all; a `RequestError` of kind overloaded when there is none within
        `seconds`."""
        more, held = size - self.size, self._bytes
        if size <= SMALL or more <= 0:
            return
        if self is held._beyond or (not held._waiting and held._fits(self, more)):
            held._take(self, more)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (self._number, self, more, turn)
        heapq.heappush(held._waiting, entry)
        held._serve()
        try:
            async with asyncio.timeout(seconds):
                await turn
        except TimeoutError:
            message = f"{held.held:,} bytes of other requests are held already; this one was not read"
            raise RequestError(ErrorKind.OVERLOADED, message, retry_after=1.0) from None
        finally:
            if entry in held._waiting:
                held._waiting.remove(entry)
                heapq.heapify(held._waiting)
                held._serve()

    def hold(self) -> None:
        """One more user: the call, which may outlive its request."""
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            held = self._bytes
            held.held -= self.size
            if held._beyond is self:
                held._beyond = None
            held._serve()


class WorkBudget:
    """Bounds what threads work on at once, by its size (pixels, characters): first come, first served.

    A caller that is cancelled leaves the queue; work that has begun holds its share until its thread has ended,
    whether or not its caller still waits. What is larger than the whole budget runs alone. There are few
    threads, because each keeps memory that its work has freed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._threads = ThreadExecutor(4, name="budget")
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """The function's result, from a thread, once there is room for `size`."""
        size = min(size, self._most)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((size, turn))
                self._serve()
            else:  # granted in the same moment
                self._release(size)
            raise
        work = asyncio.create_task(self._threads.run(function, *args))
        work.add_done_callback(lambda _: self._release(size))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as seen
        return await asyncio.shield(work)

    def _serve(self) -> None:
        while self._waiting and self.held + self._waiting[0][0] <= self._most:
            size, turn = self._waiting.popleft()
            self.held += size
            turn.set_result(None)

    def _release(self, size: int) -> None:
        self.held -= size
        self._serve()


def _expired() -> RequestError:
    return RequestError(ErrorKind.EXPIRED, "the deadline passed before there was a slot; it was not run")
