"""Workers that may die, and the episodes that live in them. Processes and actors both are workers.

Who waits for whom. An episode is placed on the worker with the fewest episodes and stays there. A call
awaits its own reply; there is no queue here, the server's admission bounds what enters. Each worker has one
keeper task that waits for the worker's end and replaces it, with a growing pause when replacements die
young. Calls that need a worker while none is alive wait for the next one, for `_PATIENCE` seconds at most.

What a death means is decided once, in `call`: an episode in which a stateful tool has been called has lost
its state and says so for ever (`EpisodeLost`); any other episode is opened again elsewhere. The call that was
running is repeated where its tool allows that, and is an `OutcomeUnknown` where it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ludus.core.failures import Boundary, ConfigError, Fault, InfraError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.tools.hosting.encoding import (
    facts_from_json,
    result_from_json,
    spec_from_json,
    task_to_json,
)
from ludus.tools.hosting.host import EpisodeLost, HostHealth, OutcomeUnknown, ToolFacts

_log = logging.getLogger(__name__)

_PATIENCE = 60.0
_MOST_REPEATS = 2
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 10.0
_YOUNG_SECONDS = 5.0


class WorkerDied(Exception):
    """The worker is gone, and with it whatever it had not answered."""


class Worker(Protocol):
    """One place that holds a tool set of its own."""

    async def start(self) -> Json:
        """Come up; the facts of the tools as `{"tools": [...]}`. `ConfigError` where they cannot be built."""

    async def request(self, operation: str, body: Json) -> Json:
        """The reply; raises what the worker raised, or `WorkerDied`. Cancelling it cancels the work."""

    async def ended(self) -> str:
        """Return when the worker is gone, with how it ended."""

    async def kill(self) -> None:
        """End it and everything it started, at once."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where an episode lives. `worker` is None while it has to be opened anew."""

    context: ToolContext
    worker: Worker | None = None
    touched: bool = False
    lost: str = ""


class PooledHost:
    """A host of several workers, each with its own tool set."""

    def __init__(self, make_worker: Callable[[], Worker], workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"a host needs at least one worker, not {workers}")
        self._make_worker, self._wanted = make_worker, workers
        self._alive: dict[Worker, set[str]] = {}
        self._places: dict[str, _Place] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._facts: dict[str, ToolFacts] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._some_alive = asyncio.Event()
        self._running = self._restarted = 0
        self._stopped = False

    async def start(self) -> Sequence[ToolFacts]:
        first = [self._make_worker() for _ in range(self._wanted)]
        starting = [asyncio.create_task(worker.start()) for worker in first]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(worker.kill() for worker in first))
            raise
        tools = starting[0].result()["tools"]
        self._facts = {raw["name"]: facts_from_json(raw) for raw in tools}
        for worker in first:
            self._welcome(worker)
            self._keepers.append(asyncio.create_task(self._keep(worker)))
        return list(self._facts.values())

    async def open(self, context: ToolContext) -> None:
        place = self._places[context.episode] = _Place(context)
        try:
            await self._settled(place)
        except BaseException:
            self._places.pop(context.episode, None)
            self._opening.pop(context.episode, None)
            raise

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        body = {"episode": context.episode}
        for _ in range(_MOST_REPEATS + 1):
            worker = await self._settled(self._place(context))
            try:
                reply = await worker.request("list", body)
            except WorkerDied as death:
                self._bury(worker, str(death))
                continue
            return [spec_from_json(raw) for raw in reply["tools"]]
        raise self._exhausted("the list of tools", _MOST_REPEATS + 1)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        self._running += 1
        try:
            return await self._called(call, self._place(context))
        finally:
            self._running -= 1

    async def close(self, context: ToolContext) -> None:
        place = self._places.pop(context.episode, None)
        self._opening.pop(context.episode, None)
        if place is None or place.worker is None:
            return
        worker, place.worker = place.worker, None
        self._alive.get(worker, set()).discard(context.episode)
        with contextlib.suppress(WorkerDied):
            await worker.request("close", {"episode": context.episode})

    async def stop(self) -> None:
        self._stopped = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._alive))
        self._alive.clear()

    def health(self) -> HostHealth:
        return HostHealth(self._running, self._wanted, len(self._alive), self._restarted)

    async def _called(self, call: ToolCall, place: _Place) -> ToolResult:
        facts = self._facts.get(call.name)
        repeatable = facts is not None and facts.repeatable
        stateful = facts is None or facts.stateful  # one that was not there at the start may do anything
        body = {
            "episode": place.context.episode,
            "call": {"name": call.name, "arguments": call.arguments, "id": call.id},
        }
        attempt = 0
        while True:
            attempt += 1
            worker = await self._settled(place)
            was_touched, place.touched = place.touched, place.touched or stateful
            try:
                result = result_from_json(await worker.request("call", body))
                if result.fault is Fault.UNKNOWN_TOOL:
                    place.touched = was_touched
                return result
            except WorkerDied as death:
                self._bury(worker, str(death))
                if place.touched:
                    raise self._lost(place, attempt) from death
                if not repeatable:
                    raise OutcomeUnknown(
                        f"{death} while it ran {call.name!r}; nobody knows whether the call took effect, "
                        "and the tool may not be repeated (retries=0)",
                        attempts=attempt,
                    ) from death
                if attempt > _MOST_REPEATS:
                    raise self._exhausted(f"the tool {call.name!r}", attempt) from death
                _log.warning("%s while it ran %r; the call is repeated", death, call.name)

    def _place(self, context: ToolContext) -> _Place:
        place = self._places.get(context.episode)
        if place is None:
            raise EpisodeLost(f"the episode {context.episode!r} is not open here")
        return place

    def _lost(self, place: _Place, attempts: int = 1) -> EpisodeLost:
        return EpisodeLost(
            f"the state of episode {place.context.episode!r} is gone: {place.lost or 'its worker died'}",
            attempts=attempts,
        )

    def _exhausted(self, what: str, attempts: int) -> InfraError:
        message = f"{what} lost its worker {attempts} times in a row"
        return InfraError(Boundary.SERVER, message, attempts=attempts, retriable=False)

    async def _settled(self, place: _Place) -> Worker:
        """The episode's worker; where it has none, it is opened on the one with the fewest episodes."""
        if place.lost:
            raise self._lost(place)
        if place.worker is not None and place.worker in self._alive:
            return place.worker
        episode = place.context.episode
        body = {"episode": episode, "task": task_to_json(place.context.task)}
        async with self._opening.setdefault(episode, asyncio.Lock()):
            for _ in range(_MOST_REPEATS + 1):
                if place.worker is not None and place.worker in self._alive:
                    return place.worker  # somebody else's call of this episode opened it meanwhile
                worker = await self._least_loaded()
                self._alive[worker].add(episode)
                try:
                    await worker.request("open", body)
                except WorkerDied as death:
                    self._bury(worker, str(death))
                    continue
                except BaseException:
                    self._alive.get(worker, set()).discard(episode)
                    raise
                place.worker = worker
                return worker
        raise self._exhausted(f"opening the episode {episode!r}", _MOST_REPEATS + 1)

    async def _least_loaded(self) -> Worker:
        try:
            async with asyncio.timeout(_PATIENCE):
                while not self._alive:
                    await self._some_alive.wait()
        except TimeoutError:
            message = f"no worker came up within {_PATIENCE:g} seconds"
            raise InfraError(Boundary.SERVER, message) from None
        return min(self._alive, key=lambda worker: len(self._alive[worker]))

    def _welcome(self, worker: Worker) -> None:
        self._alive[worker] = set()
        self._some_alive.set()

    def _bury(self, worker: Worker, how: str) -> None:
        """Note that it is gone; whoever finds out first does it."""
        if worker not in self._alive:
            return
        episodes = self._alive.pop(worker)
        if not self._alive:
            self._some_alive.clear()
        for episode in episodes:
            place = self._places.get(episode)
            if place is not None and place.worker is worker:
                place.worker = None
                place.lost = how if place.touched else ""
        _log.warning("%s; it held %d episodes and is replaced", how, len(episodes))

    async def _keep(self, worker: Worker) -> None:
        """Replace one worker, again and again, for as long as the host lives."""
        pause = _FIRST_PAUSE
        while True:
            born = time.monotonic()
            how = await worker.ended()
            self._bury(worker, how)
            await worker.kill()
            pause = _FIRST_PAUSE if time.monotonic() - born > _YOUNG_SECONDS else pause * 2
            while True:
                await asyncio.sleep(0 if pause == _FIRST_PAUSE else min(pause, _LONGEST_PAUSE))
                worker = self._make_worker()
                try:
                    await worker.start()
                    break
                except asyncio.CancelledError:
                    await worker.kill()
                    raise
                except Exception as error:  # noqa: BLE001 - whatever keeps it down, the next try may succeed
                    _log.error("a worker could not be replaced: %s", error)
                    await worker.kill()
                    pause = min(pause * 2, _LONGEST_PAUSE)
            self._restarted += 1
            self._welcome(worker)
