"""Workers that may die, and the episodes that live in them. Processes and actors both are workers.

Who waits for whom. An episode is placed on the worker with the fewest episodes and stays there. A call
awaits its own reply; there is no queue here, the server's admission bounds what enters. Each worker has one
supervisor task that waits for the worker's end and replaces it, with a growing pause when replacements die
young. Calls that need a worker while none is alive wait `_WORKER_WAIT_SECONDS` for one at most.

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
from dataclasses import dataclass, field
from typing import Protocol

from ludus.core.failures import Boundary, ConfigError, Fault, InfraError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.tools.hosting.host import FACTS, UNKNOWN, EpisodeLost, HostHealth, OutcomeUnknown, ToolFacts
from ludus.tools.wire import result_from_json, spec_from_json, task_to_json

_log = logging.getLogger(__name__)

_WORKER_WAIT_SECONDS = 60.0
_MAX_REPEATS = 2
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 10.0
_YOUNG_SECONDS = 5.0


class WorkerDied(Exception):
    """The worker is gone; requests that it had not answered are lost."""


class ToolWorker(Protocol):
    """One process or actor with a tool set of its own."""

    async def start(self) -> Json:
        """Start; the facts of the tools as `{"tools": [...]}`. `ConfigError` where they cannot be built."""

    async def request(self, operation: str, body: Json) -> Json:
        """The reply; raises what the worker raised, or `WorkerDied`. Cancelling it cancels the work."""

    async def ended(self) -> str:
        """Return when the worker is gone, with how it ended."""

    async def kill(self) -> None:
        """End it and everything it started, at once."""


@dataclass(slots=True, eq=False)
class _Placement:
    """Where an episode lives. `worker` is None while it has to be opened anew."""

    context: ToolContext
    worker: ToolWorker | None = None
    has_state: bool = False
    """Whether a stateful tool may have run."""
    lost: str = ""
    """How the worker that held its state ended."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class PooledHost:
    """A host of several workers, each with its own tool set."""

    def __init__(self, make_worker: Callable[[], ToolWorker], workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"a host needs at least one worker, not {workers}")
        self._make_worker, self._wanted = make_worker, workers
        self._alive: dict[ToolWorker, set[str]] = {}
        self._placements: dict[str, _Placement] = {}
        self._facts: dict[str, ToolFacts] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self._any_alive = asyncio.Event()
        self._running = self._restarted = 0

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
        facts = FACTS.validate_python(starting[0].result()["tools"])
        self._facts = {one.spec.name: one for one in facts}
        for worker in first:
            self._add_worker(worker)
            self._supervisors.append(asyncio.create_task(self._keep_alive(worker)))
        return list(self._facts.values())

    async def open(self, context: ToolContext) -> None:
        placement = self._placements[context.episode] = _Placement(context)
        try:
            await self._assigned_worker(placement)
        except BaseException:
            self._placements.pop(context.episode, None)
            raise

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        body = {"episode": context.episode}
        for _ in range(_MAX_REPEATS + 1):
            worker = await self._assigned_worker(self._placement(context))
            try:
                reply = await worker.request("list", body)
            except WorkerDied as death:
                self._mark_dead(worker, str(death))
                continue
            return [spec_from_json(raw) for raw in reply["tools"]]
        raise self._exhausted("the list of tools", _MAX_REPEATS + 1)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        self._running += 1
        try:
            return await self._called(call, self._placement(context))
        finally:
            self._running -= 1

    async def close(self, context: ToolContext) -> None:
        placement = self._placements.pop(context.episode, None)
        if placement is None or placement.worker is None:
            return
        worker, placement.worker = placement.worker, None
        self._alive.get(worker, set()).discard(context.episode)
        with contextlib.suppress(WorkerDied):
            await worker.request("close", {"episode": context.episode})

    async def stop(self) -> None:
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._alive))
        self._alive.clear()

    async def ask(self, what: str, context: ToolContext | None, body: Json) -> Json:
        if context is None:
            return await self._ask_all(what)
        placement = self._placement(context)
        for _ in range(_MAX_REPEATS + 1):
            worker = await self._assigned_worker(placement)
            if what == "reset":  # another episode than the one that would be opened again
                placement.has_state = True
            try:
                return await worker.request(
                    "ask", {"what": what, "episode": context.episode, "body": body}
                )
            except WorkerDied as death:
                self._mark_dead(worker, str(death))
        raise self._exhausted(f"{what!r} of the episode {context.episode!r}", _MAX_REPEATS + 1)

    async def _ask_all(self, what: str) -> Json:
        """What any worker says; numbers are those of all together."""
        body: Json = {"what": what, "episode": None, "body": {}}
        if what != "stats":
            return await (await self._least_loaded()).request("ask", body)
        total: Json = {}
        asked = [worker.request("ask", body) for worker in self._alive]
        for reply in await asyncio.gather(*asked, return_exceptions=True):
            for name, stats in reply.items() if isinstance(reply, dict) else ():
                sums = total.setdefault(name, dict.fromkeys(stats, 0))
                sums.update({key: sums[key] + value for key, value in stats.items()})
        return total

    def health(self) -> HostHealth:
        return HostHealth(self._running, self._wanted, len(self._alive), self._restarted)

    async def _called(self, call: ToolCall, placement: _Placement) -> ToolResult:
        facts = self._facts.get(call.name, UNKNOWN)
        body = {
            "episode": placement.context.episode,
            "call": {"name": call.name, "arguments": call.arguments, "id": call.id},
        }
        attempt = 0
        while True:
            attempt += 1
            worker = await self._assigned_worker(placement)
            had_state, placement.has_state = placement.has_state, placement.has_state or facts.stateful
            try:
                result = result_from_json(await worker.request("call", body))
                if result.fault is Fault.UNKNOWN_TOOL:
                    placement.has_state = had_state
                return result
            except WorkerDied as death:
                self._mark_dead(worker, str(death))
                if placement.has_state:
                    raise self._lost(placement, attempt) from death
                if not facts.repeatable:
                    raise OutcomeUnknown(
                        f"{death} while it ran {call.name!r}; nobody knows whether the call took effect, "
                        "and the tool may not be repeated (retries=0)",
                        attempts=attempt,
                    ) from death
                if attempt > _MAX_REPEATS:
                    raise self._exhausted(f"the tool {call.name!r}", attempt) from death
                _log.warning("%s while it ran %r; the call is repeated", death, call.name)

    def _placement(self, context: ToolContext) -> _Placement:
        placement = self._placements.get(context.episode)
        if placement is None:
            raise EpisodeLost(f"the episode {context.episode!r} is not open here")
        return placement

    def _lost(self, placement: _Placement, attempts: int = 1) -> EpisodeLost:
        episode, why = placement.context.episode, placement.lost or "its worker died"
        return EpisodeLost(f"the state of episode {episode!r} is gone: {why}", attempts=attempts)

    def _exhausted(self, what: str, attempts: int) -> InfraError:
        message = f"{what} lost its worker {attempts} times in a row"
        return InfraError(Boundary.SERVER, message, attempts=attempts, retriable=False)

    async def _assigned_worker(self, placement: _Placement) -> ToolWorker:
        """The episode's worker; where it has none, it is opened on the one with the fewest episodes."""
        if placement.lost:
            raise self._lost(placement)
        if placement.worker is not None and placement.worker in self._alive:
            return placement.worker
        episode = placement.context.episode
        body = {"episode": episode, "task": task_to_json(placement.context.task)}
        async with placement.opening:
            for _ in range(_MAX_REPEATS + 1):
                if placement.worker is not None and placement.worker in self._alive:
                    return placement.worker  # somebody else's call of this episode opened it meanwhile
                worker = await self._least_loaded()
                self._alive[worker].add(episode)
                try:
                    await worker.request("open", body)
                except WorkerDied as death:
                    self._mark_dead(worker, str(death))
                    continue
                except BaseException:
                    self._alive.get(worker, set()).discard(episode)
                    raise
                placement.worker = worker
                return worker
        raise self._exhausted(f"opening the episode {episode!r}", _MAX_REPEATS + 1)

    async def _least_loaded(self) -> ToolWorker:
        try:
            async with asyncio.timeout(_WORKER_WAIT_SECONDS):
                while not self._alive:
                    await self._any_alive.wait()
        except TimeoutError:
            message = f"no worker came up within {_WORKER_WAIT_SECONDS:g} seconds"
            raise InfraError(Boundary.SERVER, message) from None
        return min(self._alive, key=lambda worker: len(self._alive[worker]))

    def _add_worker(self, worker: ToolWorker) -> None:
        self._alive[worker] = set()
        self._any_alive.set()

    def _mark_dead(self, worker: ToolWorker, how: str) -> None:
        """Take a dead worker out; its episodes are opened elsewhere, or lost where they had state."""
        if worker not in self._alive:
            return
        episodes = self._alive.pop(worker)
        if not self._alive:
            self._any_alive.clear()
        for episode in episodes:
            placement = self._placements.get(episode)
            if placement is not None and placement.worker is worker:
                placement.worker = None
                placement.lost = how if placement.has_state else ""
        _log.warning("%s; it held %d episodes and is replaced", how, len(episodes))

    async def _keep_alive(self, worker: ToolWorker) -> None:
        """Replace one worker, again and again, for as long as the host lives."""
        pause = _FIRST_PAUSE
        while True:
            started = time.monotonic()
            how = await worker.ended()
            self._mark_dead(worker, how)
            await worker.kill()
            pause = _FIRST_PAUSE if time.monotonic() - started > _YOUNG_SECONDS else pause * 2
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
            self._add_worker(worker)
