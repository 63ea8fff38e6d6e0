"""A host of several workers (processes or actors), each with a tool set of its own, and the episodes in them.

Who waits for whom. An episode is placed on the worker with the fewest episodes and stays there. A call awaits
its own reply; there is no queue here, the server's admission bounds what enters. A supervisor replaces workers
that end. Calls that need a worker while none is alive wait `_WORKER_WAIT_SECONDS` for one at most.

The end of a worker means for its episodes what `remote/lost_episodes.py` decides: one with state is lost, any
other is opened again elsewhere, and the call that was running is repeated where its tool allows that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ludus.core.failures import Boundary, ConfigError, Fault, InfraError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.remote.channel import ServiceProcess
from ludus.remote.lost_episodes import EpisodeLost, EpisodeState, check_repeatable
from ludus.remote.supervisor import Member, NoWorker, Supervisor, Worker, WorkerDied
from ludus.remote.threads import WorkerError
from ludus.tools.hosting.host import (
    FACTS,
    LOADER,
    UNKNOWN,
    HostHealth,
    ToolFacts,
    ToolReference,
    reply_of,
)
from ludus.tools.wire import result_from_json, spec_from_json, task_to_json

_log = logging.getLogger(__name__)

_START_SECONDS = 120.0
_WORKER_WAIT_SECONDS = 60.0
_MAX_REPEATS = 2


class ToolWorker(Worker, Protocol):
    """One process or actor with a tool set of its own.

    `start` gives the facts of the tools as `{"tools": [...]}`; `ConfigError` where they cannot be built.
    """

    async def request(self, operation: str, body: Json) -> Json:
        """The reply; raises what the worker raised, or `WorkerDied`. Cancelling it cancels the work."""


@dataclass(slots=True, eq=False)
class _Placement:
    """Where an episode lives."""

    context: ToolContext
    state: EpisodeState = field(default_factory=EpisodeState)
    member: Member[ToolWorker] | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    def current(self) -> Member[ToolWorker] | None:
        """The worker that it is open in, if it is; `EpisodeLost` once its state is gone."""
        if self.member is not None and not self.member.is_up:
            self.state.gone(self.member.reason)
            self.member = None
        self.state.check()
        return self.member


class PooledHost:
    """A host of several workers, each with its own tool set."""

    def __init__(self, make_worker: Callable[[int], ToolWorker], workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"a host needs at least one worker, not {workers}")
        self._workers: Supervisor[ToolWorker] = Supervisor(make_worker, workers)
        self._placements: dict[str, _Placement] = {}
        self._facts: dict[str, ToolFacts] = {}
        self._running = 0

    async def start(self) -> Sequence[ToolFacts]:
        await self._workers.start()
        facts = FACTS.validate_python(self._workers.members[0].started["tools"])
        self._facts = {one.spec.name: one for one in facts}
        return facts

    async def open(self, context: ToolContext) -> None:
        placement = self._placements[context.episode] = _Placement(context)
        try:
            await self._opened(placement)
        except BaseException:
            self._placements.pop(context.episode, None)
            raise

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        placement = self._placement(context)
        reply = await self._asked(placement, "list", {"episode": context.episode}, "the list of tools")
        return [spec_from_json(raw) for raw in reply["tools"]]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        self._running += 1
        try:
            return await self._called(call, self._placement(context))
        finally:
            self._running -= 1

    async def close(self, context: ToolContext) -> None:
        placement = self._placements.pop(context.episode, None)
        self._workers.release(context.episode)
        if placement is not None and placement.member is not None and placement.member.is_up:
            with contextlib.suppress(WorkerDied):
                await placement.member.worker.request("close", {"episode": context.episode})

    async def stop(self) -> None:
        await self._workers.close()

    async def ask(self, what: str, context: ToolContext | None, body: Json) -> Json:
        if context is None:
            return await self._ask_all(what)
        placement = self._placement(context)
        if what == "reset":  # another episode than the one that would be opened again
            await self._opened(placement)
            placement.state.has_state = True
        question: Json = {"what": what, "episode": context.episode, "body": body}
        return await self._asked(
            placement, "ask", question, f"{what!r} of the episode {context.episode!r}"
        )

    async def _ask_all(self, what: str) -> Json:
        """What any worker says; numbers are those of all together."""
        body: Json = {"what": what, "episode": None, "body": {}}
        if what != "stats":
            return await (await self._placed(None)).worker.request("ask", body)
        total: Json = {}
        asked = [member.worker.request("ask", body) for member in self._workers.members]
        for reply in await asyncio.gather(*asked, return_exceptions=True):
            for name, stats in reply.items() if isinstance(reply, dict) else ():
                sums = total.setdefault(name, dict.fromkeys(stats, 0))
                sums.update({key: sums[key] + value for key, value in stats.items()})
        return total

    def health(self) -> HostHealth:
        workers = self._workers
        return HostHealth(self._running, workers.size, len(workers.members), workers.replaced)

    async def _called(self, call: ToolCall, placement: _Placement) -> ToolResult:
        facts, state = self._facts.get(call.name, UNKNOWN), placement.state
        body = {
            "episode": placement.context.episode,
            "call": {"name": call.name, "arguments": call.arguments, "id": call.id},
        }
        attempt = 0
        while True:
            attempt += 1
            member = await self._opened(placement)
            had_state, state.has_state = state.has_state, state.has_state or facts.stateful
            try:
                result = result_from_json(await member.worker.request("call", body))
            except WorkerDied as death:
                member.take_out(str(death))
                state.gone(str(death), attempts=attempt)
                check_repeatable(call.name, facts.repeatable, str(death), attempts=attempt)
                if attempt > _MAX_REPEATS:
                    raise self._exhausted(f"the tool {call.name!r}", attempt) from death
                _log.warning("%s while it ran %r; the call is repeated", death, call.name)
                continue
            if result.fault is Fault.UNKNOWN_TOOL:
                state.has_state = had_state
            return result

    async def _asked(self, placement: _Placement, operation: str, body: Json, what: str) -> Json:
        """The reply to a question, which may be put again to another worker."""
        for _ in range(_MAX_REPEATS + 1):
            member = await self._opened(placement)
            try:
                return await member.worker.request(operation, body)
            except WorkerDied as death:
                member.take_out(str(death))
        raise self._exhausted(what, _MAX_REPEATS + 1)

    def _placement(self, context: ToolContext) -> _Placement:
        placement = self._placements.get(context.episode)
        if placement is None:
            raise EpisodeLost(f"the episode {context.episode!r} is not open here")
        return placement

    def _exhausted(self, what: str, attempts: int) -> InfraError:
        message = f"{what} lost its worker {attempts} times in a row"
        return InfraError(Boundary.SERVER, message, attempts=attempts, retriable=False)

    async def _opened(self, placement: _Placement) -> Member[ToolWorker]:
        """The episode's worker; where it has none, it is opened on the one with the fewest episodes."""
        if (member := placement.current()) is not None:
            return member
        episode = placement.context.episode
        body = {"episode": episode, "task": task_to_json(placement.context.task)}
        async with placement.opening:
            for _ in range(_MAX_REPEATS + 1):
                if (member := placement.current()) is not None:
                    return member  # another call of this episode has opened it meanwhile
                member = await self._placed(episode)
                try:
                    await member.worker.request("open", body)
                except WorkerDied as death:
                    member.take_out(str(death))
                    continue
                except BaseException:
                    self._workers.release(episode)
                    raise
                placement.member = member
                return member
        raise self._exhausted(f"opening the episode {episode!r}", _MAX_REPEATS + 1)

    async def _placed(self, episode: str | None) -> Member[ToolWorker]:
        try:
            return await self._workers.place(episode, seconds=_WORKER_WAIT_SECONDS)
        except NoWorker as error:
            raise InfraError(Boundary.SERVER, str(error)) from None


class ProcessHost(PooledHost):
    """A host of `workers` processes. Tools are given by reference, because each process builds its own."""

    def __init__(
        self,
        references: Sequence[ToolReference],
        workers: int = 2,
        *,
        hang_seconds: float = 60.0,
        loader: str = LOADER,
    ) -> None:
        """`loader` names the function that builds a tool set from the references."""
        super().__init__(lambda _: ProcessWorker(references, hang_seconds, loader), workers)


class ProcessWorker:
    """One worker process with its own event loop and tool set.

    One that gives no sign of life for `hang_seconds` (an async tool blocks its event loop) is killed, and its
    host replaces it.
    """

    def __init__(
        self, references: Sequence[ToolReference], hang_seconds: float, loader: str = LOADER
    ) -> None:
        self._references, self._loader = list(references), loader
        self._process = ServiceProcess("ludus.tools.hosting.host:HostedTools", hang_seconds=hang_seconds)

    async def start(self) -> Json:
        setup = {"references": self._references, "loader": self._loader}
        try:
            async with asyncio.timeout(_START_SECONDS):
                return reply_of(*await self._process.start(setup))
        except WorkerError as error:
            raise ConfigError(str(error)) from error
        except WorkerDied as death:
            raise ConfigError(f"{death} before it was ready") from None
        except TimeoutError:
            raise ConfigError(
                f"a worker process was not ready within {_START_SECONDS:g} seconds"
            ) from None

    async def request(self, operation: str, body: Json) -> Json:
        return reply_of(*await self._process.request(operation, {"body": body}))

    async def ended(self) -> str:
        return await self._process.ended()

    async def kill(self) -> None:
        await self._process.kill()
