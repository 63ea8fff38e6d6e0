"""A supervisor keeps a fixed number of workers running, and says which one serves next.

    supervisor = Supervisor(lambda number: MyProcess(number), size=4)      # `Worker`: start, ended, kill
    await supervisor.start()
    member = await supervisor.place("episode 7", seconds=60.0)     # the same one for as long as it lives
    with member.busy():
        answer = await member.answer(member.worker.ask(...), seconds=30.0)

A worker that ends, or that its user takes out, is killed and replaced: at once if it had served for a while,
after failures in a row with a pause that doubles; with `Restarts.most` its place is given up in the end. What
replaces it is a new `Member`, so that a caller that holds the old one sees that it is gone, and why.

Who waits for whom. One task for each place waits for the end of its worker and replaces it. `place` waits, at
most for `seconds`, while no worker serves. Starting is bounded by the worker itself, killing by
`kill_seconds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)

_KILL_SECONDS = 60.0


class Worker(Protocol):
    """Something that serves until it dies: a process, an actor, a server."""

    async def start(self) -> Any:
        """Return when it serves. Its own deadline bounds this; what it returns is `Member.started`."""

    async def ended(self) -> str:
        """Return when it has died, or does not answer any more, with the reason in words."""

    async def kill(self) -> None:
        """End it and everything it started, in whatever state it is; safe more than once."""


W = TypeVar("W", bound=Worker)
T = TypeVar("T")


class WorkerDied(Exception):
    """The worker is gone; what it had not answered is lost."""


class NoWorker(Exception):
    """No worker serves: none came back in time, all were given up, or the supervisor is closed."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final
        """Whether none will ever come back."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """When a worker is started again, and how often."""

    first_pause: float = 0.1
    """Seconds before the second attempt; doubled for each further one."""
    longest_pause: float = 10.0
    steady_seconds: float = 5.0
    """One that has served for so long was well: its death does not count as one in a row."""
    most: int | None = None
    """So many failures in a row are tried again; any number when left out."""

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        if failures <= 0:
            return 0.0
        return float(min(self.longest_pause, self.first_pause * 2 ** min(failures - 1, 64)))


class Member(Generic[W]):
    """One worker from its start to its end."""

    def __init__(self, number: int, worker: W) -> None:
        self.number, self.worker = number, worker
        self.started: Any = None
        """Result of its `start`."""
        self.since = 0.0
        self.keys: set[str] = set()
        """Sticky keys: the episodes or sessions that were placed here."""
        self.calls = 0
        """Calls in flight that belong to no key."""
        self.is_proven = False
        """Set by its user where it has shown that it is well: failures before it do not count as in a row."""
        self.is_last = False
        """Whether its place is given up with it."""
        self.down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when it is taken out."""

    @property
    def is_up(self) -> bool:
        return not self.down.done()

    @property
    def reason(self) -> str:
        """Why it was taken out; empty while it serves."""
        return self.down.result() if self.down.done() else ""

    @property
    def load(self) -> int:
        return len(self.keys) + self.calls

    def take_out(self, reason: str, *, for_good: bool = False) -> None:
        """Let it serve no longer: it is killed, and replaced unless this is `for_good`."""
        if not self.down.done():
            self.is_last = for_good
            self.down.set_result(reason)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count a call that belongs to no key, so that others go elsewhere."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    async def answer(self, call: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """What a call of the worker gives; `WorkerDied` when it is taken out first, `TimeoutError` when it
        takes longer. Either way the call is cancelled."""
        task = asyncio.ensure_future(call)
        try:
            waiting = (task, self.down)
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not (self.down.done() and task.exception() is not None):
                return task.result()
        finally:
            await _let_go(task)
        if self.down.done():
            raise WorkerDied(self.reason)
        raise TimeoutError


async def _let_go(task: asyncio.Future[Any]) -> None:
    """Cancel a call without a caller, and look at its error so that asyncio does not complain of it."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=_KILL_SECONDS)
    if task.done() and not task.cancelled():
        task.exception()


@dataclass(slots=True)
class _Place(Generic[W]):
    """A place for one worker."""

    number: int
    member: Member[W] | None = None
    failures: int = 0
    """In a row."""
    is_given_up: bool = False
    reason: str = "it has not been started"


class Supervisor(Generic[W]):
    """Keeps `size` workers running."""

    def __init__(
        self,
        make: Callable[[int], W],
        size: int,
        *,
        restarts: Restarts | None = None,
        name: str = "worker",
        kill_seconds: float = _KILL_SECONDS,
    ) -> None:
        """`make` gives a new worker for a place, not started; `name` is what logs and errors call one."""
        if size < 1:
            raise ValueError(f"a supervisor needs at least one {name}, not {size}")
        self._make, self.size, self.name = make, size, name
        self._rule, self._kill_seconds = restarts or Restarts(), kill_seconds
        self._places = [_Place[W](number) for number in range(size)]
        self._keepers: list[asyncio.Task[None]] = []
        self._keys: dict[str, Member[W]] = {}
        self._changed = asyncio.Event()
        self._is_closed = False
        self.replaced = 0
        """How many were replaced since the start."""

    @property
    def members(self) -> list[Member[W]]:
        """Members that are serving."""
        return [one.member for one in self._places if one.member is not None and one.member.is_up]

    async def start(self) -> None:
        """Start all of them at once; an error of one ends the others and is raised. May follow a `close`."""
        self._is_closed = False
        self._places = [_Place(number) for number in range(self.size)]
        starting = [asyncio.create_task(self._start_one(place)) for place in self._places]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.close()
            raise
        self._keepers = [asyncio.create_task(self._keep(place)) for place in self._places]

    async def close(self) -> None:
        """Kill all of them; calls and callers that wait for one get an error."""
        self._is_closed = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        members = [place.member for place in self._places if place.member is not None]
        for member in members:
            member.take_out(f"the {self.name}s are stopped")
        await asyncio.gather(*(self._kill(member.worker) for member in members))
        for place in self._places:
            place.member = None
        self._keys.clear()
        self._notify()

    # Which one

    async def place(self, key: str | None = None, *, seconds: float) -> Member[W]:
        """The worker that has this key, or the one with the least to do, which has the key from now on.

        `NoWorker` where none serves within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            known = self.where(key) if key is not None else None
            if known is not None:
                return known
            serving = self.members
            if serving:
                member = min(serving, key=lambda one: one.load)
                if key is not None:
                    self.assign(key, member)
                return member
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                raise NoWorker(
                    f"no {self.name} came up within {seconds:g} seconds: {self.reasons()}"
                ) from None

    def where(self, key: str) -> Member[W] | None:
        """The worker that has this key, if it serves."""
        member = self._keys.get(key)
        return member if member is not None and member.is_up else None

    def assign(self, key: str, member: Member[W]) -> None:
        """Give a key to this worker."""
        self.release(key)
        self._keys[key] = member
        member.keys.add(key)

    def release(self, key: str) -> None:
        """Forget a key; one that is unknown is ignored."""
        member = self._keys.pop(key, None)
        if member is not None:
            member.keys.discard(key)

    def reasons(self) -> str:
        """Why those that do not serve do not."""
        down = [place for place in self._places if place.member is None or not place.member.is_up]
        return "; ".join(
            f"{self.name} {one.number}: {one.member.reason if one.member is not None else one.reason}"
            for one in down
        )

    def check(self) -> None:
        """`NoWorker` where none will ever serve again."""
        if self._is_closed:
            raise NoWorker(f"the {self.name}s are stopped", is_final=True)
        if all(place.is_given_up for place in self._places):
            raise NoWorker(f"no {self.name} is left: {self.reasons()}", is_final=True)

    # Keeping them running

    async def _start_one(self, place: _Place[W]) -> None:
        worker = self._make(place.number)
        try:
            started = await worker.start()
        except BaseException:
            await self._kill(worker)
            raise
        member = Member(place.number, worker)
        member.started, member.since = started, time.monotonic()
        place.member = member
        self._notify()

    async def _keep(self, place: _Place[W]) -> None:
        """Replace the worker of a place, again and again, until it is given up."""
        while True:
            member = place.member
            assert member is not None
            place.reason = await self._death(member)
            was_steady = time.monotonic() - member.since > self._rule.steady_seconds
            place.failures = 0 if was_steady or member.is_proven else place.failures + 1
            for key in member.keys:
                self._keys.pop(key, None)
            _log.warning(
                "%s %d is taken out: %s; it held %d sessions",
                *(self.name, place.number, place.reason, len(member.keys)),
            )
            await self._kill(member.worker)
            place.member, place.is_given_up = None, member.is_last
            if not await self._replace(place):
                return

    async def _replace(self, place: _Place[W]) -> bool:
        """Start another worker in a place, however often that takes; whether there is one."""
        while True:
            if self._rule.most is not None and place.failures > self._rule.most:
                place.is_given_up = True
            if place.is_given_up:
                _log.error("%s %d is given up: %s", self.name, place.number, place.reason)
                self._notify()
                return False
            await asyncio.sleep(self._rule.pause(place.failures))
            try:
                await self._start_one(place)
            except Exception as error:  # noqa: BLE001 - whatever keeps it down, the next try may succeed
                place.failures += 1
                place.reason = f"{type(error).__name__}: {error}"
                _log.warning(
                    "%s %d could not be started again: %s", self.name, place.number, place.reason
                )
                continue
            self.replaced += 1
            return True

    async def _death(self, member: Member[W]) -> str:
        """Wait until a worker has ended or was taken out; returns why."""
        ending = asyncio.ensure_future(member.worker.ended())
        try:
            await asyncio.wait((ending, member.down), return_when=asyncio.FIRST_COMPLETED)
            if not member.down.done():
                error = ending.exception()
                member.take_out(ending.result() if error is None else f"{type(error).__name__}: {error}")
            return member.reason
        finally:
            await _let_go(ending)

    async def _kill(self, worker: W) -> None:
        try:
            async with asyncio.timeout(self._kill_seconds):
                await worker.kill()
        except Exception as error:  # noqa: BLE001 - it is not needed any more
            _log.warning("a %s could not be ended: %s: %s", self.name, type(error).__name__, error)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
