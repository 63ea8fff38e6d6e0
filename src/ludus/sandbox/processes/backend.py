"""Sessions and one-shot executions that are forked from workers (fork servers).

A one-shot Python program runs in a slot, which is reused when the program has provably left nothing in it;
everything else gets a fork of its own.

Who waits for whom. An execution waits for capacity (`max_sessions`), then for a worker with fewer than
`max_starting` starting executions: those in their first 30 milliseconds, which is when they cost CPU time;
older ones mostly sleep and do not delay others. A worker that dies is replaced; executions that were in it are
run again elsewhere, and its sessions are lost (`SessionLost`).

This does not use `remote/supervisor.py`: a worker that cannot be started fails the executions that wait for
one at once, and the next execution tries again, whereas a `Supervisor` retries on its own while its callers
wait; and the first worker is the one that `prepare` has tried the isolation layers with.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from typing import Any, Literal

from ludus.core.messages import released_slot
from ludus.sandbox.config import Limits, SandboxConfig, SandboxError, SandboxUnavailable, SessionLost
from ludus.sandbox.exchange import Execution
from ludus.sandbox.processes.isolation import ProcessLayers, prepare
from ludus.sandbox.processes.session import ProcessSession
from ludus.sandbox.processes.worker import SandboxWorker
from ludus.sandbox.sandbox import Files, SandboxBackend, Session

_STARTING_SECONDS = 0.03
"""Longer than a program takes to start in a slot; 0.1 halves the rate of programs that sleep or wait."""
_IDLE_SECONDS = 2.0
_ATTEMPTS = 5


class ProcessBackend(SandboxBackend):
    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._layers: ProcessLayers | None = None
        self.workers: list[SandboxWorker] = []
        self._changing = asyncio.Lock()
        self._queue: deque[asyncio.Future[SandboxWorker]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._idle: dict[ProcessSession, float] = {}
        """Free slots and since when they are, the oldest first. Each still holds capacity."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> ProcessLayers:
        """Start the workers that are missing."""
        async with self._changing:
            if self._closed:
                raise SandboxError("the sandbox is closed", retriable=False)
            if self._layers is None:
                self._layers, first = await prepare(self.config, self._on_death)
                self.workers = [first]
            missing = self.config.worker_count - len(self.workers)
            if missing > 0:
                layers = self._layers
                started = [
                    SandboxWorker(layers.settings, layers.group, self._on_death) for _ in range(missing)
                ]
                try:
                    told = await asyncio.gather(*(w.start() for w in started), return_exceptions=True)
                except asyncio.CancelledError:  # nothing else would close those that have started
                    await asyncio.gather(*(worker.close() for worker in started))
                    raise
                self.workers += [worker for worker in started if worker.is_alive]
                for answer in told:
                    if isinstance(answer, BaseException):
                        raise answer
                # `_on_death` does not know workers that died while others were still starting.
                dead = [worker for worker in started if not worker.is_alive]
                if dead:
                    await asyncio.gather(*(worker.close() for worker in dead))
                    raise SandboxError("a fork server ended as soon as it had started")
            return self._layers

    @property
    def alive(self) -> int:
        return sum(worker.sessions for worker in self.workers) - len(self._idle)

    async def session(self, limits: Limits, image: str | None) -> Session:
        if image is not None:
            raise SandboxUnavailable(
                f'the image {image!r} needs a container: set sandbox.tier = "docker", "podman" or "kubernetes"'
            )
        session, start = await self._open(limits, one_shot=False, is_slot=False)
        start.release()  # what a session runs, and when, is not known yet
        return session

    async def open(self, limits: Limits, image: str | None) -> Session:
        return await self.session(limits, image)  # capacity is held by processes: forks count, too

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*self._background, return_exceptions=True)
        async with self._changing:
            workers, self.workers = self.workers, []
            self._idle.clear()
            if self._sweeping is not None:
                self._sweeping.cancel()
            await asyncio.gather(*(worker.close() for worker in workers))
            if self._layers is not None:
                self._layers.remove()
        for waiting in self._queue:
            if not waiting.done():
                waiting.set_exception(SandboxError("the sandbox was closed", retriable=False))
        self._queue.clear()

    def abandon(self) -> None:
        self._closed = True
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.abandon()
        for worker in workers:
            worker.wait_for_end()
        if self._layers is not None:
            self._layers.remove()

    async def once(
        self,
        what: Literal["python", "shell", "run"],
        given: Any,
        stdin: str,
        files: Files | None,
        limits: Limits,
    ) -> Execution:
        """Run something in its own session; run it again if it was lost with its worker."""
        layers = await self._started()
        is_slot = what == "python" and not files and layers.has_slots
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                session, start = await self._open(limits, one_shot=True, is_slot=is_slot)
                try:
                    await session.put(files)
                    run = {"python": session.python, "shell": session.shell, "run": session.run}[what]
                    said = await run(given, stdin=stdin)
                finally:
                    await self._put_back(session, start)
                return session.accounted(said)
            except SandboxError as lost:
                can_be_repeated = lost.retriable or isinstance(lost, SessionLost)
                if attempt == _ATTEMPTS or self._closed or not can_be_repeated:
                    raise SandboxError(f"{lost} ({attempt} attempts)") from lost
        raise AssertionError("unreachable")

    async def _started(self) -> ProcessLayers:
        if self._layers is None or len(self.workers) < self.config.worker_count:
            return await self.start()
        return self._layers

    async def _open(
        self, limits: Limits, *, one_shot: bool, is_slot: bool
    ) -> tuple[ProcessSession, _StartPermit]:
        """A session or a slot, and its permit to start at its worker."""
        await self._started()
        while self._idle and self._capacity.locked():
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            await oldest.close()
        if self._capacity.locked():
            with released_slot():
                await self._capacity.acquire()
        else:
            await self._capacity.acquire()
        try:
            worker = await self._acquire_start()
        except BaseException:
            self._capacity.release()
            raise
        start = _StartPermit(self, worker)
        idle = self._idle_slot(worker, limits) if is_slot else None
        if idle is not None:
            self._capacity.release()  # the slot holds some already
            return idle, start
        guest = worker.spawn(limits, self._capacity, one_shot=one_shot, is_slot=is_slot)
        guest.ended.add_done_callback(lambda _: start.release())
        try:
            await guest.opened()
        except BaseException:
            await guest.end()
            raise
        return ProcessSession(guest, is_slot=is_slot), start

    def _idle_slot(self, worker: SandboxWorker, limits: Limits) -> ProcessSession | None:
        """A free slot of this worker: the one used last, whose memory is still in the caches."""
        for slot in reversed(list(self._idle)):
            if slot.worker is worker and slot.limits == limits:
                del self._idle[slot]
                if slot.is_reusable:
                    return slot
                self._later(slot.close())
        return None

    async def _put_back(self, session: ProcessSession, start: _StartPermit) -> None:
        """Keep a slot that is proven clean for the next program; close anything else."""
        free = sum(slot.worker is session.worker for slot in self._idle)
        has_room = free < self.config.max_starting and not self._capacity.locked() and not self._closed
        if session.is_reusable and has_room:
            loop = asyncio.get_running_loop()
            self._idle[session] = loop.time()
            self._sweeping = self._sweeping or loop.call_later(_IDLE_SECONDS, self._sweep)
        else:
            await session.close()
        start.release()

    def _sweep(self) -> None:
        """Close slots that were not used for a while: each holds some memory."""
        loop = asyncio.get_running_loop()
        old = [slot for slot, since in self._idle.items() if since <= loop.time() - _IDLE_SECONDS]
        for slot in old:
            del self._idle[slot]
            self._later(slot.close())
        self._sweeping = loop.call_later(_IDLE_SECONDS, self._sweep) if self._idle else None

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background that only `close` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _acquire_start(self) -> SandboxWorker:
        if self._closed:
            raise SandboxError("the sandbox was closed", retriable=False)
        worker = self._least_loaded()
        if worker is not None and not self._queue:
            worker.starting += 1
            return worker
        waiting: asyncio.Future[SandboxWorker] = asyncio.get_running_loop().create_future()
        self._queue.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._release_start(waiting.result())
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove(waiting)
            raise

    def _least_loaded(self) -> SandboxWorker | None:
        free = [worker for worker in self.workers if worker.is_alive]
        free = [worker for worker in free if worker.starting < self.config.max_starting]
        return min(free, key=lambda worker: (worker.starting, worker.sessions), default=None)

    def _release_start(self, worker: SandboxWorker) -> None:
        """One execution less is starting: the first in the queue may start."""
        worker.starting -= 1
        self._serve_queue()

    def _serve_queue(self) -> None:
        while self._queue and (worker := self._least_loaded()) is not None:
            waiting = self._queue.popleft()
            if not waiting.done():
                worker.starting += 1
                waiting.set_result(worker)

    def _on_death(self, worker: SandboxWorker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            self._idle = {slot: since for slot, since in self._idle.items() if slot.worker is not worker}
            if not self._closed:
                self.replaced += 1
                self._later(worker.close())
                self._later(self._replace())

    async def _replace(self) -> None:
        """Start a new worker in place of a dead one; if that fails, so do the callers that wait for one."""
        try:
            await self.start()
        except Exception as error:  # noqa: BLE001 - raised in the callers that wait
            while self._queue:
                waiting = self._queue.popleft()
                if not waiting.done():
                    waiting.set_exception(SandboxError(f"no worker could be started: {error}"))
            return
        self._serve_queue()


class _StartPermit:
    """Counts one execution as starting at a worker; released once, after 30 milliseconds at the latest."""

    def __init__(self, backend: ProcessBackend, worker: SandboxWorker) -> None:
        self._backend, self._worker, self._held = backend, worker, True
        self._timer = asyncio.get_running_loop().call_later(_STARTING_SECONDS, self.release)

    def release(self) -> None:
        if self._held:
            self._held = False
            self._timer.cancel()
            self._backend._release_start(self._worker)
